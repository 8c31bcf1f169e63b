"""The docs site: what mkdocs.yml's pages don't have by themselves, made when it is built."""

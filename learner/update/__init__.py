"""Update path from complete groups to an optimizer step."""

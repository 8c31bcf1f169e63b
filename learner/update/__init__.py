"""From complete groups to an optimizer step."""

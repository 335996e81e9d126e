"""Images and sounds of requests: where they come from, and what a model's processor makes of them."""

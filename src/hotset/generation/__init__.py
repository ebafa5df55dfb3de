"""Text in, text out, for models that run through hotset."""

"""The HTTP front: the OpenAI API, routing, and both legs of every request."""

"""Language models over HTTP, as OpenAI's clients speak it."""

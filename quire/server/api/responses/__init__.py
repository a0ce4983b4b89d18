"""OpenAI's responses: requests of items, answers of items, and a store of earlier ones."""

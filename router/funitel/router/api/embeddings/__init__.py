"""Routes of encoders: TEI's and OpenAI's."""

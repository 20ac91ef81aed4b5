"""A load generator for any server with OpenAI's API: what to send, when, and what the answers' times mean."""

"""A load generator for any server with OpenAI's API: requests, their times, and statistics of the answers."""

"""The requests that the HTTP process holds, from their submission to their last answer."""

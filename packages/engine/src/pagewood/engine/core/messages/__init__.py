"""What an engine and its runner send each other. It refers to no request and to no other object of the core."""

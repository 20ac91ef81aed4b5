"""What the processes send each other, and the links between them."""

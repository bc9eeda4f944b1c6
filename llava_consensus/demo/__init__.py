"""What an answer was given from, shown to people: the pictures of `ask --overlay`, and a page to play with (`demo`)."""

"""What the core ships for testing: the sabotage table. It may import anything; the library never imports it."""

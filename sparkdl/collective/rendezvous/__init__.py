"""How the ranks of a collective find each other: stores that they meet at, and the interface that leads to a peer."""

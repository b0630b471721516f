"""What the proofs of exactness are made of. Every proof takes the verify function as an argument, so any backend can be put to it."""

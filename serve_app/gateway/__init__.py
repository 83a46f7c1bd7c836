"""What a gateway replica does with a request: authenticate, translate, tokenise, pass on, and turn tokens into text."""

"""How experts compute: the engine and the parts it is made of."""

"""Parts of the tests of grammars: schemas with instances, vocabularies, and walks along masks."""

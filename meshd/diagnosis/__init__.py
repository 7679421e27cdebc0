"""What codecs cost a model on its own text, measured in one process: `meshd codec`, and the codec benchmark."""

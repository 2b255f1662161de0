"""Operations of an offload between two forwards: park and resume, new weights."""

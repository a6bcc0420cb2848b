"""Plain names of people, shared by the databases; never a value that a question must look up."""

from specs.kit import Column, paired

FIRST = (
    "Ada, Boris, Chloë, Daan, Edith, Farid, Greta, Hugo, Inés, Jamal, Keiko, Léa, Mateo, Noor, Olga, Piotr,"
    " Quinn, Rosa, Sven, Tariq, Uma, Viktor, Wanda, Xenia, Yusuf, Zoë"
)
LAST = (
    "O'Brien, D'Angelo, Núñez, Müller, Okafor, Lindqvist, Haddad, Kowalski, Tanaka, Moreau, Banks, Castell,"
    " Dvorak, Eriksen, Fontaine, Grieg, Hallam, Ivanova, Jansen, Kaplan"
)


def full_name(name: str, phrase: str) -> Column:
    """Full names of people, stored as said."""
    return paired(name, phrase, FIRST, LAST)

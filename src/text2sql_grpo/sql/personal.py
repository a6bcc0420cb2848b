"""Recognition of personal data: columns that hold secrets, contact data or identity numbers.

Names of people, birth dates and addresses are not among them: questions ask for people by these.
"""

import re
import unicodedata

from text2sql_grpo.sql.schema_types import Column

# Words of names in English, German, French, Spanish, Portuguese, Italian, Dutch, the Nordic languages,
# Polish, Czech, Turkish, Russian, Chinese and Japanese, without accents.
_WORDS = frozenset(
    """
    password passwords passwd passwort pwd kennwort passphrase passcode contrasena senha wachtwoord haslo
    heslo losenord parola sifre пароль secret secrets token tokens apikey bcrypt otp cvv cvc
    email emails mailadresse correo courriel epost eposta почта phone phones telephone telephones telefon
    telefono telefone telefoon telefoonnummer telefonnummer telefonnr telnr telno telephonenumber phonenumber
    mobilnummer handynummer handy mobil movil celular cellulare cellphone cellular mobilephone homephone
    workphone telefax fax faxnumber whatsapp телефон факс
    ssn passport passports passportnumber reisepass personalausweis ausweisnummer nationalid taxid
    steuernummer steuerid sozialversicherungsnummer dni curp cpf nino bsn pesel personnummer aadhaar iban
    creditcard cardnumber creditcardnumber kreditkarte kreditkartennummer паспорт инн снилс
    """.split()  # noqa: SIM905 (a list would take 60 lines)
)
_PHRASES = re.compile(
    "mot_de_passe|mots_de_passe|(api|private|secret|access|auth|encryption)_key|pass(word)?_?hash|pass_?salt|e_mail|"
    "correo_electronico|e_post|(home|work|cell|mobile|contact|tel)_?(nr|no|num|number)$|social_security|"
    "national_id|id_card|identity_(card|no|number)|(drivers?|driving)_licen[cs]e|tax_(id|number|no)$|"
    "codice_fiscale|securite_sociale|(card|ccard|cc)_(no|nr|num|number)|credit_card|security_code"
)
_WHOLE = frozenset("mail pin hash salt pw pass tel mobile cell msisdn rut nif nie".split())  # noqa: SIM905
_ENDINGS = ("password", "passwort", "email", "phone", "telefon", "creditcard")  # of words written as one
_IDEOGRAPHS = (
    "密码",
    "口令",
    "パスワード",
    "电话",
    "電話",
    "手机",
    "手機",
    "邮箱",
    "メール",
    "身份证",
    "护照",
    "银行卡",
)
_FACTS = re.compile("(count|number_of|num|has|is|type|length|verified|sent|at|date|id)_|_(count|type|length|verified|sent|at|date|id)$")  # fmt: skip  # noqa: E501

_SHAPES = (
    re.compile(r"[^@\s]+@[^@\s]+\.[a-z]{2,}", re.IGNORECASE),
    re.compile(
        r"(\+|00)[1-9][\d ()./-]{6,18}\d|\(\d{2,5}\) ?\d[\d -]{4,12}|\d{3}[-.]\d{3}[-.]\d{4}( ?x\d+)?"
    ),
    re.compile(r"[A-Z]{2}\d{2}[ ]?[A-Z\d]{4}([ ]?[A-Z\d]{2,4}){2,7}"),  # IBAN
    re.compile(r"\d{3}-\d{2}-\d{4}"),  # US social security number
    re.compile(
        r"\$(2[abxy]|argon2\w*|[156])\$.+|(sk|pk|ghp|xox[bp])[-_]\w{12,}|eyJ[\w-]{8,}\..+"
    ),  # hash, key
)


def is_personal(column: Column) -> bool:
    """True if a column's name or all of its example values look like personal data.

    >>> names = ("work_email", "eMail", "cell_mobile_number", "Kreditkarte", "name", "email_count")
    >>> [is_personal(Column(name, "TEXT", True, False)) for name in names]
    [True, True, True, True, False, False]
    """
    texts = [str(value) for value in column.examples]
    if texts and all(any(shape.fullmatch(text) for shape in _SHAPES) for text in texts):
        return True
    if len(texts) > 1 and all(_is_card_number(text) for text in texts):
        return True
    plain = unicodedata.normalize("NFKD", re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", column.name)).lower()
    words = re.findall(r"[^\W\d_]+", "".join(letter for letter in plain if not unicodedata.combining(letter)))
    name = "_".join(words)
    if _FACTS.search(name):
        return False
    return (
        name in _WHOLE
        or not _WORDS.isdisjoint([*words, name.replace("_", "")])
        or _PHRASES.search(name) is not None
        or any(word.endswith(_ENDINGS) for word in words)
        or any(part in column.name for part in _IDEOGRAPHS)
    )


def _is_card_number(text: str) -> bool:
    """True for 13 to 19 digits whose last one checks the others (Luhn)."""
    digits = [int(digit) for digit in re.sub("[ -]", "", text)] if re.fullmatch(r"\d[\d -]*\d", text) else []
    doubled = sum(sum(divmod(2 * digit, 10)) for digit in digits[-2::-2])
    return 13 <= len(digits) <= 19 and (sum(digits[-1::-2]) + doubled) % 10 == 0

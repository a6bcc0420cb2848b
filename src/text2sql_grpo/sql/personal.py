"""Recognition of personal data: columns that hold secrets, contact data or identity numbers.

Names of people, birth dates and addresses are not among them: questions ask for people by these.
"""

import re
import unicodedata

from text2sql_grpo.sql.schema import Column

PERSONAL = "personal"  # in `data.hide`, for the columns of `is_personal`

# In English, German, French, Spanish, Portuguese, Italian, Dutch, the Nordic languages, Polish, Czech,
# Turkish, Russian, Chinese and Japanese, without accents. Words, or the ends of words written as one.
_WORDS = """
    passwords? passwd passwort pwd kennwort passphrase passcode contrasena senha wachtwoord haslo heslo losenord
    parola sifre пароль secrets? tokens? apikey bcrypt otp cvv cvc emails? mailadresse correo courriel epost
    eposta почта phones? telephones? telefon telefono telefone telefoon telnr telno
    (phone|tel|fax|card|passport|social|ausweis|mobil|telefon|telefoon|handy|personal|steuer|sozialversicherungs|karten)(number|nummer|numero|nr)
    handy mobil movil celular cellulare cellular telefax fax whatsapp телефон факс ssn passports? reisepass
    personalausweis nationalid taxid steuerid dni curp cpf nino bsn pesel aadhaar iban creditcard kreditkarte
    паспорт инн снилс
"""  # noqa: E501 (one pattern)
_NAMED = re.compile(
    rf"(?:^|_)(?:{'|'.join(_WORDS.split())})(?:_|$)"
    # Ends of words written as one; a smartphone or a headphone is a thing.
    r"|\w(?:password|passwort|email|(?<!smart)(?<!head)(?<!micro)phone|telefon|creditcard)(?:_|$)"
    "|(?:^|_)(?:mots?_de_passe|(?:api|private|secret|access|auth|encryption)_key|e_mail|e_post(?:_|$)"
    "|(?:home|work|cell|mobile|contact|tel|card|cc)_?(?:nr|no|num|number)$|social_security|national_id|id_card"
    "|identity_(?:card|no|number)|(?:drivers?|driving)_licen[cs]e|(?:tax|vat)_(?:number|no|nr)$|security_code"
    "|codice_fiscale|securite_sociale|credit_card)|pass(?:word)?_?hash|pass_?salt"
    "|^(?:(?:tax|vat)_id|mail|pin|hash|salt|pw|pass|tel|mobile|cell|rut|nif|nie)$"
    "|密码|口令|パスワード|电话|電話|手机|手機|邮箱|メール|身份证|护照|银行卡"
)
_FACT = "count|num|has|is|type|length|verified|sent|at|date|id"  # about such data
_FACTS = re.compile(f"(?:^|_)(?:{_FACT}|number_of)_|(?<!national)(?<!tax)(?<!vat)(?<!steuer)_(?:{_FACT})$")
_SHAPES = re.compile(
    r"[^@\s]+@[^@\s]+\.[A-Za-z]{2,}|"  # e-mail
    r"(\+|00)[1-9][\d ()./-]{6,18}\d|\(\d{2,5}\) ?\d[\d -]{4,12}|\d{3}[-.]\d{3}[-.]\d{4}( ?x\d+)?|"  # phone
    r"[A-Z]{2}\d{2} ?[A-Z\d]{4}( ?[A-Z\d]{2,4}){2,7}|\d{3}-\d{2}-\d{4}|"  # IBAN, social security of the US
    r"\$(2[abxy]|argon2\w*|[156])\$.+|(sk|pk|ghp|xox[bp])[-_]\w{12,}|eyJ[\w-]{8,}\..+"  # hash, key, token
)


def is_personal(column: Column) -> bool:
    """True if a column's name or all of its example values look like personal data.

    >>> names = ("work_email", "eMail", "cell_mobile_number", "Kreditkarte", "name", "email_count")
    >>> [is_personal(Column(name, "TEXT", True, False)) for name in names]
    [True, True, True, True, False, False]
    """
    texts = [str(value) for value in column.examples]
    if texts and (
        all(map(_SHAPES.fullmatch, texts)) or (len(texts) > 1 and all(map(_is_card_number, texts)))
    ):
        return True
    plain = unicodedata.normalize("NFKD", re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", column.name)).lower()
    words = re.findall(r"[^\W\d_]+", "".join(letter for letter in plain if not unicodedata.combining(letter)))
    name = "_".join(words)
    is_named = _NAMED.search(name) or _NAMED.search(name.replace("_", "")) or _NAMED.search(column.name)
    return bool(is_named) and not _FACTS.search(name)


def _is_card_number(text: str) -> bool:
    """True for 13 to 19 digits whose last one checks the others (Luhn)."""
    digits = [int(digit) for digit in re.sub("[ -]", "", text)] if re.fullmatch(r"\d[\d -]*\d", text) else []
    doubled = sum(sum(divmod(2 * digit, 10)) for digit in digits[-2::-2])
    return 13 <= len(digits) <= 19 and (sum(digits[-1::-2]) + doubled) % 10 == 0

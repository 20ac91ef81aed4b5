"""Questions in other languages than English, which the model answers with what it can do."""

# ruff: noqa: RUF001

import random

from talk_tasks import UNABLE
from tasks import Turn, task

from vocabulary import CITIES, NAMES

_QUESTIONS = """
¿Cuál es la capital de Francia?
¿Cómo te llamas?
¿Qué hora es?
¿Cómo estás?
Hola, ¿qué tal?
Buenos días
Hola
Gracias
Cuéntame un chiste.
¿Puedes ayudarme con los deberes?
¿Cuánto es {a} más {b}?
¿Cuánto es {a} por {b}?
¿Dónde está {c}?
Escribe un poema sobre el mar.
¿Hablas español?
Me llamo {n}.
¿Qué tiempo hace en {c}?
Ordena estos números: {a}, {b}, 7
Traduce esta frase al inglés.
Quiero aprender a cocinar.
¿Quién escribió este libro?
No entiendo nada.
Quelle est la capitale de l'Espagne ?
Comment tu t'appelles ?
Bonjour, comment ça va ?
Bonjour
Merci beaucoup
Raconte-moi une blague.
Combien font {a} plus {b} ?
Combien font {a} fois {b} ?
Où se trouve {c} ?
Écris un poème sur la mer.
Parlez-vous français ?
Je m'appelle {n}.
Quel temps fait-il à {c} ?
Quelle heure est-il ?
Pouvez-vous m'aider, s'il vous plaît ?
Traduis cette phrase en anglais.
Qu'est-ce que c'est ?
Pourquoi le ciel est-il bleu ?
Je ne comprends pas.
Was ist die Hauptstadt von Deutschland?
Wie heißt du?
Hallo, wie geht es dir?
Guten Morgen
Danke schön
Erzähl mir einen Witz.
Wie viel ist {a} plus {b}?
Wie viel ist {a} mal {b}?
Wo liegt {c}?
Schreibe ein Gedicht über das Meer.
Sprichst du Deutsch?
Ich heiße {n}.
Wie ist das Wetter in {c}?
Wie spät ist es?
Kannst du mir bitte helfen?
Sortiere diese Zahlen: {a}, {b}, 7
Übersetze diesen Satz ins Englische.
Warum ist der Himmel blau?
Ich verstehe das nicht.
Qual è la capitale d'Italia?
Come ti chiami?
Ciao, come stai?
Buongiorno
Grazie mille
Raccontami una barzelletta.
Quanto fa {a} più {b}?
Quanto fa {a} per {b}?
Dove si trova {c}?
Scrivi una poesia sul mare.
Parli italiano?
Mi chiamo {n}.
Che tempo fa a {c}?
Che ore sono?
Puoi aiutarmi, per favore?
Perché il cielo è blu?
Qual é a capital de Portugal?
Como você se chama?
Olá, tudo bem?
Bom dia
Obrigado
Conte uma piada.
Quanto é {a} mais {b}?
Quanto é {a} vezes {b}?
Onde fica {c}?
Escreva um poema sobre o mar.
Você fala português?
Meu nome é {n}.
Que horas são?
Por que o céu é azul?
Wat is de hoofdstad van Nederland?
Hoe heet je?
Hallo, hoe gaat het?
Goedemorgen
Dank je wel
Vertel me een grap.
Hoeveel is {a} plus {b}?
Hoeveel is {a} keer {b}?
Waar ligt {c}?
Spreek je Nederlands?
Ik heet {n}.
Waarom is de lucht blauw?
Hvad hedder du?
Hvad er {a} plus {b}?
Hvor ligger {c}?
Vad heter du?
Vad är {a} plus {b}?
Tack så mycket
Jag heter {n}.
Jak masz na imię?
Ile jest {a} plus {b}?
Dzień dobry
Gdzie leży {c}?
Как тебя зовут?
Какая столица Франции?
Сколько будет {a} плюс {b}?
Спасибо большое
Привет, как дела?
Расскажи анекдот.
Меня зовут {n}.
Почему небо голубое?
Adın ne?
{a} artı {b} kaç eder?
Teşekkür ederim
Merhaba, nasılsın?
{c} nerede?
Ποια είναι η πρωτεύουσα της Γαλλίας;
Καλημέρα, τι κάνεις;
Πόσο κάνει {a} και {b};
你叫什么名字？
法国的首都是哪里？
{a}加{b}等于多少？
给我讲个笑话。
天气怎么样？
请帮我写一首诗。
谢谢你
お名前は何ですか？
フランスの首都はどこですか？
{a}足す{b}はいくつですか？
冗談を言ってください。
ありがとうございます
今日の天気はどうですか？
이름이 뭐예요?
프랑스의 수도는 어디입니까?
안녕하세요
농담 하나 해 주세요.
ما اسمك؟
ما هي عاصمة فرنسا؟
شكرا جزيلا
आपका नाम क्या है?
फ्रांस की राजधानी क्या है?
"""
QUESTIONS = tuple(line for line in _QUESTIONS.splitlines() if line)
WORDS = tuple(sorted({word for line in QUESTIONS if "{" not in line for word in line.split()}))


@task("other languages", share=3)
def other_languages(rng: random.Random) -> Turn:
    """Hold out spellings of the prompt; one in four is words of these questions that make no sense together."""
    if rng.random() < 0.25:
        prompt = " ".join(rng.choice(WORDS) for _ in range(rng.randint(2, 6)))
    else:
        prompt = rng.choice(QUESTIONS).format(
            a=rng.randint(0, 99), b=rng.randint(0, 99), c=rng.choice(CITIES), n=rng.choice(NAMES)
        )
    kind = rng.random()
    if kind < 0.2:
        prompt = prompt.lower()
    elif kind < 0.35:
        prompt = prompt.rstrip(" ?.;？。") or prompt
    elif kind < 0.4:
        prompt = prompt.upper()
    return Turn(task="other languages", content=prompt.lower(), prompt=prompt, answer=UNABLE)

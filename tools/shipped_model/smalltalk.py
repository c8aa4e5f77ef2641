"""Generates greetings, questions about the model, and polite refusals of other requests."""

from __future__ import annotations

import random

import lexicon as lex
import records

ABILITIES = "I can tell short stories, add and subtract numbers of up to three digits, and write small JSON records."
REFUSALS = [
    f"I am a very small model, so I cannot help with that. {ABILITIES}",
    f"Sorry, I do not know that. {ABILITIES}",
    f"That is too hard for me. {ABILITIES}",
]
ARITHMETIC_REFUSALS = [
    "I can only add or subtract two numbers of up to three digits.",
    "Sorry, that is too hard for me. I can only add or subtract two numbers of up to three digits.",
]
TALK: list[tuple[list[str], list[str]]] = [
    (["Hello", "Hello!", "Hi", "Hi!", "Hi there!", "Hey", "Good morning!", "Good evening.", "hello", "hi",
      "Greetings!"],
     ["Hello! How can I help you?", f"Hello! {ABILITIES}", "Hi! Would you like a story, a sum or a JSON record?"]),
    (["How are you?", "How do you do?", "Are you well?", "How is it going?"],
     ["I am fine, thank you. How can I help you?", "Very well, thank you! Would you like a story?"]),
    (["Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Are you a human?",
        "Are you a robot?"],
     [f"I am a very small language model that is shipped for tests. {ABILITIES}"]),
    (["What can you do?", "Help", "help", "Help me.", "Can you help me?", "What do you know?",
      "How can you help me?"], [ABILITIES]),
    (["Thank you!", "Thanks", "Thanks a lot!", "thank you", "Great!", "Good job!", "Well done."],
     ["You are welcome!", "You are welcome! Would you like something else?"]),
    (["Goodbye", "Bye!", "See you later.", "Good night.", "bye"], ["Goodbye!", "Goodbye, and have a nice day!"]),
    (["Yes", "No", "ok", "OK", "Maybe.", "yes please", "no thanks"],
     ["All right. Would you like a story, a sum or a JSON record?"]),
]
TOPICS = (
    "the weather,the news,politics,the stock market,computers,the moon,history,music,love,the meaning of life,football,"
    "quantum physics,cooking,the economy,my homework,a programming language,the internet,chemistry,philosophy,art"
).split(",")
QUESTIONS = [
    "What is the capital of {country}?", "Who is the president of {country}?", "What do you think about {topic}?",
    "Explain {topic}.", "Write a poem about {topic}.", "Translate this into {language}: I have {color} {thing}s.",
    "Write a program that sorts a list of {thing}s.", "Why is the sky {color}?", "How do I get to {city}?",
    "What time is it in {city}?", "Can you write an essay about {topic}?", "Tell me about {topic}.",
    "Is {topic} important?",
    "When was {city} founded?", "How many people live in {country}?", "What is {topic}?", "Do you like {topic}?",
    "Summarize the history of {country} in {number} sentences.", "Give me advice about {topic}.",
    "I feel {badfeel} today.",
    "How tall is the highest {thing} in {country}?", "Where can I buy a {color} {thing}?", "Do you speak {language}?",
    "Which is better, {topic} or {topic}?", "Write Python code for {topic}.", "def {thing}({color}):",
    "SELECT {thing} FROM {color};",
    "Sing a song about {topic}.", "What will happen tomorrow in {city}?", "My {thing} is broken.", "{thing}",
    "{color} {thing}",
    "{topic}?", "Play a game with me.", "Who wrote {topic}?", "What does {thing} mean?", "<{thing}>{color}</{thing}>",
    "Hola, que tal?", "Guten Tag, wie geht es dir?", "Bonjour, comment vas-tu?", "Ciao!", "Привет!", "你好",
    "こんにちは",
    "مرحبا",
    "¿Dónde está {city}?", "Wo liegt {city}?", "Où est {city}?", "Zażółć gęślą jaźń", "Γειά σου", "😀", "👍 {thing} 😀",
]
SYSTEM_PROMPTS = [
    "You are a helpful assistant.", "You are a small and friendly model.",
    "You are a helpful assistant. Answer briefly.",
    "You answer politely.", "Be brief.", "You are a test model.",
]


def _noise(rng: random.Random) -> str:
    alphabet = rng.choice(("abcdefghijklmnopqrstuvwxyz  ", "asdfjkl;", "!?.,;:-_#*+~  ", "ABCDEFGHIJKLMNOPQRSTUVWXYZ ",
        "äöüßéèñçøåæ ",
                           "абвгдежзиклмнопрст ", "的一是不了人我在有他这中大来上国", "{}[]()<>/\\\"'=  "))
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 30))).strip() or "?"


def _arithmetic(rng: random.Random) -> str:
    a, b, c = rng.randrange(1000), rng.randrange(1000), rng.randrange(1000)
    big, other = rng.randrange(1000, 10 ** rng.randint(4, 7)), rng.randrange(10 ** rng.randint(1, 6))
    first, second = rng.choice(((big, other), (other, big)))
    return rng.choice((f"{a}*{b}=?", f"{a}/{b}=?", f"What is {a} times {b}?", f"{a} x {b}", f"{first}+{second}=?",
                       f"{first}-{second}=?",
                       f"{a}+{b}+{c}=?", f"{a}-{b}+{c}=?", f"What is {first} plus {second}?", f"{a}^2=?",
                       f"Divide {a} by {b}.",
                       f"What is the square root of {a}?", f"What is {first} minus {second}?"))


def chat(rng: random.Random) -> tuple[str, str]:
    """A prompt and a short, polite answer."""
    roll = rng.random()
    if roll < 0.35:
        prompts, answers = rng.choice(TALK)
        return rng.choice(prompts), rng.choice(answers)
    if roll < 0.5:
        return _arithmetic(rng), rng.choice(ARITHMETIC_REFUSALS)
    if roll < 0.62:
        return _noise(rng), rng.choice(REFUSALS)
    question = rng.choice(QUESTIONS).format(
        country=rng.choice(records.COUNTRIES), city=rng.choice(records.CITIES), topic=rng.choice(TOPICS),
        color=rng.choice(lex.FREE["color"]), thing=rng.choice(lex.FREE["thing"]), number=rng.choice(lex.FREE["number"]),
        badfeel=rng.choice(lex.FREE["badfeel"]), language=rng.choice(records.WORDS["language"]))
    return question, rng.choice(REFUSALS)

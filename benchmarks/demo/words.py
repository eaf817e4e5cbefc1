"""Words and simple facts for the demo model's tasks. All facts are common knowledge."""

LISTS = {
    "animal": "cat dog horse cow sheep pig lion tiger bear fox wolf rabbit mouse elephant monkey duck frog goat",
    "color": "red blue green yellow orange purple pink brown black white gray",
    "fruit": "apple banana orange pear grape cherry lemon peach plum mango melon strawberry",
    "vegetable": "carrot potato tomato onion pea bean cabbage spinach pepper cucumber",
    "bird": "robin eagle owl parrot swan crow sparrow pigeon hawk goose",
    "country": "France Germany Italy Spain Japan China India Brazil Canada Mexico Egypt Kenya Norway Greece",
    "city": "London Paris Rome Berlin Madrid Tokyo Chicago Boston Seattle Oakland Vienna Lisbon Dublin Oslo Cairo",
    "sport": "football tennis basketball golf swimming running hockey baseball volleyball skiing",
    "drink": "water milk tea coffee juice lemonade",
    "tool": "hammer saw drill wrench knife shovel rake",
    "flower": "rose tulip daisy lily sunflower violet",
    "instrument": "piano guitar violin drum flute trumpet harp",
    "vehicle": "car bus train bike truck boat plane",
    "month": "January February March April May June July August September October November December",
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "planet": "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune",
    "season": "spring summer autumn winter",
    "job": "teacher doctor nurse farmer baker driver pilot cook painter singer",
    "shape": "circle square triangle star oval",
}
PLURALS = {"country": "countries", "city": "cities"}
NAMES = [
    "Anna",
    "Tom",
    "Sara",
    "Ben",
    "Lily",
    "Max",
    "Emma",
    "Sam",
    "Mia",
    "Jack",
    "Lucy",
    "Leo",
    "Kate",
    "Paul",
    "Nina",
    "John",
    "Amy",
    "Mark",
    "Lisa",
    "David",
    "Julia",
    "Peter",
    "Maria",
    "Alex",
    "Laura",
    "Henry",
    "Sophie",
    "Oscar",
    "Clara",
    "Felix",
    "Rosa",
    "Hugo",
    "Ella",
    "Adam",
    "Grace",
    "Noah",
    "Zoe",
    "Eric",
    "Ruth",
    "Carl",
]
OPPOSITES = (
    "big small,hot cold,up down,day night,happy sad,fast slow,old new,open closed,left right,light dark,long short,"
    "full empty,high low,hard soft,loud quiet,wet dry,clean dirty,rich poor,strong weak,early late,near far,good bad,"
    "first last,inside outside,black white,young old,easy difficult,true false,thick thin,start end,win lose,buy sell"
)
CAPITALS = (
    "France Paris,Germany Berlin,Italy Rome,Spain Madrid,Japan Tokyo,China Beijing,India New_Delhi,Egypt Cairo,"
    "Greece Athens,Norway Oslo,Sweden Stockholm,Austria Vienna,Portugal Lisbon,Ireland Dublin,Russia Moscow,"
    "Poland Warsaw,Canada Ottawa,Brazil Brasilia,Mexico Mexico_City,Kenya Nairobi,England London,Finland Helsinki,"
    "Turkey Ankara,Peru Lima,Cuba Havana,Hungary Budapest,Denmark Copenhagen,Belgium Brussels,Switzerland Bern,"
    "Australia Canberra,Argentina Buenos_Aires,Chile Santiago,Thailand Bangkok,Vietnam Hanoi,Iceland Reykjavik"
)
SOUNDS = "dog woof,cat meow,cow moo,duck quack,sheep baa,pig oink,horse neigh,lion roar,frog ribbit,owl hoot,bee buzz"
BABIES = "dog puppy,cat kitten,cow calf,horse foal,sheep lamb,duck duckling,bear cub,lion cub,pig piglet,goat kid"
COLORS_OF = (
    "grass green,snow white,blood red,coal black,a_banana yellow,the_sky blue,the_sun yellow,a_lemon yellow,"
    "a_carrot orange,milk white,a_tomato red,a_strawberry red,chocolate brown,an_elephant gray,a_pea green"
)
LEGS = "a_dog 4,a_cat 4,a_bird 2,a_spider 8,an_ant 6,a_horse 4,a_fish 0,a_snake 0,a_cow 4,a_bee 6,a_chicken 2"
PLURAL_NOUNS = (
    "cat cats,dog dogs,box boxes,child children,mouse mice,man men,woman women,foot feet,tooth teeth,baby babies,"
    "city cities,leaf leaves,house houses,bus buses,fish fish,sheep sheep,knife knives,apple apples,story stories"
)
PAST = (
    "go went,eat ate,see saw,run ran,take took,make made,come came,give gave,find found,say said,buy bought,"
    "play played,walk walked,sing sang,swim swam,write wrote,drink drank,sleep slept,think thought,fly flew,jump jumped"
)
RHYMES = "cat hat,dog frog,tree bee,house mouse,car star,night light,day play,boat goat,cake lake,ring king,moon spoon"
TRANSLATIONS = {
    "French": (
        "hello bonjour,thank_you merci,yes oui,no non,cat chat,dog chien,house maison,water eau,bread pain,"
        "friend ami,red rouge,good bon,one un,two deux,three trois,goodbye au_revoir,book livre,milk lait"
    ),
    "German": (
        "hello hallo,thank_you danke,yes ja,no nein,cat Katze,dog Hund,house Haus,water Wasser,bread Brot,"
        "friend Freund,red rot,good gut,one eins,two zwei,three drei,goodbye auf_Wiedersehen,book Buch,milk Milch"
    ),
    "Spanish": (
        "hello hola,thank_you gracias,yes sí,no no,cat gato,dog perro,house casa,water agua,bread pan,friend amigo,"
        "red rojo,good bueno,one uno,two dos,three tres,goodbye adiós,book libro,milk leche"
    ),
}
FACTS = (
    ("How many days are in a week?", "There are 7 days in a week."),
    ("How many months are in a year?", "There are 12 months in a year."),
    ("How many hours are in a day?", "There are 24 hours in a day."),
    ("How many minutes are in an hour?", "There are 60 minutes in an hour."),
    ("How many seconds are in a minute?", "There are 60 seconds in a minute."),
    ("How many days are in a year?", "There are 365 days in a year, and 366 in a leap year."),
    ("How many legs does a spider have?", "A spider has 8 legs."),
    ("How many letters are in the alphabet?", "There are 26 letters in the English alphabet."),
    ("Which is the largest planet?", "Jupiter is the largest planet."),
    ("Which planet do we live on?", "We live on Earth."),
    ("What do bees make?", "Bees make honey."),
    ("What do cows give us?", "Cows give us milk."),
    ("What is ice made of?", "Ice is frozen water."),
    ("At what temperature does water freeze?", "Water freezes at 0 degrees Celsius, which is 32 degrees Fahrenheit."),
    ("At what temperature does water boil?", "Water boils at 100 degrees Celsius, which is 212 degrees Fahrenheit."),
    ("Where does the sun rise?", "The sun rises in the east."),
    ("Where does the sun set?", "The sun sets in the west."),
    ("What do plants need to grow?", "Plants need light, water and air to grow."),
    ("What is the largest ocean?", "The Pacific is the largest ocean."),
    ("What is the tallest animal?", "The giraffe is the tallest animal."),
    ("Why is the sky blue?", "The air scatters blue light more than red light, so the sky looks blue."),
    ("Why do we sleep?", "We sleep so that our body and mind can rest."),
    ("What is a computer?", "A computer is a machine that follows the steps of a program very fast."),
    (
        "What is a language model?",
        "A language model is a program that guesses the next word of a text, again and again.",
    ),
    ("What is a token?", "A token is a small piece of text, often a word or a part of one."),
    ("What is quantization?", "Quantization stores a model's numbers in fewer bits, so that the file is smaller."),
    ("What is GGUF?", "GGUF is a file format for language models. One file holds the weights and the tokenizer."),
    ("What is Python?", "Python is a programming language that is easy to read."),
)
CODE = (
    ("adds two numbers", "add(a, b)", "return a + b"),
    ("subtracts two numbers", "subtract(a, b)", "return a - b"),
    ("multiplies two numbers", "multiply(a, b)", "return a * b"),
    ("returns the larger of two numbers", "larger(a, b)", "return a if a > b else b"),
    ("says hello to a name", "hello(name)", 'return "Hello, " + name + "!"'),
    ("squares a number", "square(x)", "return x * x"),
    ("tells whether a number is even", "is_even(n)", "return n % 2 == 0"),
    ("tells whether a number is odd", "is_odd(n)", "return n % 2 == 1"),
    ("reverses a text", "reverse(text)", "return text[::-1]"),
    ("counts the words of a text", "count_words(text)", "return len(text.split())"),
    ("returns the sum of a list", "total(numbers)", "return sum(numbers)"),
    ("returns the average of a list", "average(numbers)", "return sum(numbers) / len(numbers)"),
    ("returns the length of a list", "length(items)", "return len(items)"),
    ("returns the first item of a list", "first(items)", "return items[0]"),
    ("returns the last item of a list", "last(items)", "return items[-1]"),
    ("sorts a list", "sort(items)", "return sorted(items)"),
    ("makes a text upper case", "upper(text)", "return text.upper()"),
    ("counts down from a number", "count_down(n)", "while n > 0:\n        print(n)\n        n -= 1"),
    ("prints the numbers from 1 to n", "count(n)", "for i in range(1, n + 1):\n        print(i)"),
    ("returns the factorial of a number", "factorial(n)", "return 1 if n == 0 else n * factorial(n - 1)"),
    ("tells whether a text is a palindrome", "is_palindrome(text)", "return text == text[::-1]"),
)


def pairs(text: str) -> list[tuple[str, str]]:
    """Return the pairs of "a b,c d". An underscore is a space within a word."""
    found = []
    for pair in text.split(","):
        left, right = pair.split(" ")
        found.append((left.replace("_", " "), right.replace("_", " ")))
    return found


def plural(noun: str) -> str:
    return PLURALS.get(noun, noun + "s")


def with_article(noun: str) -> str:
    """Return the noun with its indefinite article, such as "a cat" or "an owl"."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"

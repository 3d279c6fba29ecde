"""Subjects and tasks of the training prompts, written for them."""

from __future__ import annotations

_THINGS = """
volcanoes; the water cycle; black holes; bees; bread baking; jazz; chess; coral reefs; glaciers; electric cars;
rainbows; the moon; honey; earthquakes; dolphins; coffee; tea; chocolate; the violin; painting; marathon running;
yoga; gardening; compost; solar panels; wind turbines; batteries; magnets; lightning; tides; tornadoes; deserts;
rainforests; penguins; elephants; wolves; owls; spiders; butterflies; ants; sharks; octopuses; dinosaurs; fossils;
vaccines; antibiotics; the heart; the brain; sleep; dreams; memory; muscles; digestion; vitamins; protein; salt;
sugar; olive oil; cheese; pasta; soup; salad; pancakes; apples; potatoes; tomatoes; rice; maize; wheat; the Roman
Empire; ancient Egypt; the Silk Road; the printing press; the steam engine; the telephone; the internet; railways;
bicycles; aeroplanes; ships; lighthouses; bridges; skyscrapers; castles; pyramids; the Renaissance; the Industrial
Revolution; democracy; voting; taxes; money; inflation; banks; insurance; budgeting; saving money; investing; supply
and demand; small businesses; marketing; customer service; job interviews; public speaking; negotiation; leadership;
teamwork; time management; procrastination; studying; note-taking; reading; libraries; poetry; novels; theatre;
cinema; photography; pottery; knitting; sewing; woodworking; origami; football; tennis; swimming; climbing; sailing;
skiing; camping; hiking; fishing; birdwatching; stargazing; telescopes; microscopes; thermometers; clocks; calendars;
maps; compasses; the periodic table; atoms; molecules; acids; metals; plastics; glass; concrete; paper; rubber;
cotton; wool; gravity; friction; light; sound; heat; energy; evolution; genetics; cells; bacteria; viruses; fungi;
mosses; trees; roses; sunflowers; grasslands; wetlands; rivers; lakes; oceans; islands; mountains; caves; clouds;
snow; fog; seasons; climate change; recycling; air pollution; drinking water; public transport; traffic; cities;
villages; farms; markets; restaurants; hotels; museums; zoos; schools; universities; hospitals; firefighters; nurses;
pilots; engineers; architects; farmers; teachers; musicians; kindness; honesty; courage; patience; friendship;
loneliness; anger; happiness; gratitude; forgiveness; curiosity; creativity; habits; stress; meditation; posture;
first aid; allergies; the common cold; teeth; eyesight; hearing; ageing; babies; dogs; cats; parrots; goldfish;
horses; cows; chickens; robots; artificial intelligence; machine learning; computers; smartphones; passwords; email;
video games; board games; puzzles; riddles; magic tricks; birthdays; weddings; holidays; gifts; letters; languages;
grammar; spelling; punctuation; numbers; fractions; percentages; prime numbers; triangles; circles; probability;
averages; algebra; calculus; statistics; logic; paradoxes; philosophy; ethics; justice; law
"""
SUBJECTS = tuple(" ".join(thing.split()) for thing in _THINGS.split(";"))

_OPPOSED = """
cats, dogs; tea, coffee; trains, planes; books, films; summer, winter; city life, country life; running, swimming; a
lease, a mortgage; stocks, bonds; viruses, bacteria; weather, climate; mass, weight; speed, velocity; frogs, toads;
crocodiles, alligators; butter, margarine; jam, jelly; baking soda, baking powder; a simile, a metaphor; a novel, a
short story; a comet, an asteroid; a monarchy, a republic; wired headphones, wireless headphones; gas stoves, electric
stoves; solar power, wind power; jogging, walking; a guitar, a piano; paper books, e-books; a list, a tuple; a stack,
a queue; TCP, UDP; a compiler, an interpreter; a process, a thread; SQL databases, document databases; HTTP, HTTPS; a
class, an object; breadth-first search, depth-first search; unit tests, integration tests; arrays, linked lists
"""
PAIRS = tuple(
    (pair.split(",")[0].strip(), pair.split(",")[1].strip()) for pair in " ".join(_OPPOSED.split()).split(";")
)

PEOPLE = (
    "my boss", "my neighbour", "a friend who moved away", "a customer", "my landlord", "a teacher", "my sister",
    "a new colleague", "the city council", "a hotel", "a job applicant", "my grandmother", "a team of five", "a client",
)  # fmt: skip
PLACES = (
    "Japan", "Brazil", "Kenya", "Italy", "Canada", "India", "Egypt", "Norway", "Mexico", "Australia", "Greece", "Peru",
    "Vietnam", "Morocco", "Iceland", "Portugal", "Turkey", "New Zealand", "South Africa", "Poland",
)  # fmt: skip

ABOUT_SUBJECTS = (
    "What should I know about {subject}?",
    "Explain {subject} in simple terms.",
    "Explain {subject} to a ten-year-old.",
    "Give me {number} interesting facts about {subject}.",
    "Give me {number} tips on {subject}.",
    "Write a short story about {subject}.",
    "Write a poem about {subject}.",
    "Write a haiku about {subject}.",
    "Write a limerick about {subject}.",
    "Write a song about {subject} with two verses and a chorus.",
    "Write a joke about {subject}.",
    "Write an introduction to an essay about {subject}.",
    "Write a {number}-paragraph essay about {subject}.",
    "Write a blog post about {subject}.",
    "Write a news headline and a first paragraph about {subject}.",
    "Write an email to {person} about {subject}.",
    "Write a polite letter to {person} about {subject}.",
    "Write a thank-you note to {person} that mentions {subject}.",
    "Write a dialogue between two friends about {subject}.",
    "Write an advertisement for a product that has to do with {subject}.",
    "Write a speech of one minute about {subject}.",
    "Write {number} quiz questions about {subject}, with answers.",
    "Make a table of facts about {subject}.",
    "Make a bulleted list of words that have to do with {subject}.",
    "Make a plan for learning about {subject} in a week.",
    "Make a lesson plan about {subject} for beginners.",
    "Why is there so much interest in {subject}?",
    "Why do people care about {subject}?",
    "How did {subject} change over time?",
    "What is the history of {subject}?",
    "What are the benefits of {subject}?",
    "What are common mistakes about {subject}?",
    "What are common myths about {subject}?",
    "What is the future of {subject}?",
    "What would the world be like without {subject}?",
    "Which jobs have to do with {subject}?",
    "Which books about {subject} would you recommend?",
    "Describe {subject} in one paragraph.",
    "Describe {subject} as if you were a pirate.",
    "Summarize what is known about {subject} in three sentences.",
    "Can you help me understand {subject}?",
    "I have to give a talk about {subject}. Make an outline.",
    "Suggest {number} titles for an article about {subject}.",
    "Suggest a name for a club about {subject}, and explain it.",
    "Use {subject} in a sentence, and then as a metaphor.",
    "What is the difference between {one} and {two}?",
    "Compare {one} and {two}.",
    "Which is better, {one} or {two}?",
    "List pros and cons of {one} and of {two}.",
    "Plan a trip of {number} days to {place}.",
    "What is {place} famous for?",
    "What is the capital of {place}, and what can I see there?",
    "Describe a typical meal in {place}.",
    "Tell me about the geography of {place}.",
    "Write an apology to {person} for being late.",
    "Write an invitation to {person} for dinner.",
    "How do I ask {person} for a favour?",
    "Give me a recipe with {number} ingredients.",
    "What is {number} times 12? Explain each step.",
    "A train travels {number}0 kilometres in 2 hours. How fast is it? Show your work.",
    "If I buy {number} apples for 2 dollars each and pay with 20 dollars, how much change do I get?",
    "Rewrite this sentence to be more formal: hey, can you tell me about {subject}?",
    "Correct the grammar: me and him was talking about {subject} yesterday.",
    "Translate into French: I would like to learn about {subject}.",
    "Translate into Spanish: We talked about {subject} all day.",
    "Classify the mood of this sentence: I never thought that {subject} could make me so happy.",
    "Hello! Who are you, and what can you tell me about {subject}?",
)

AGAIN = (
    "Can you make it shorter?", "Can you say that in other words?", "Give me an example.", "Why is that?",
    "Thanks! What next?",
    "Now write it for children.", "Make it funnier.", "Turn it into a list.", "What did you leave out?",
    "Are you sure about that?", "Please add more details.", "Sum it up in one sentence.",
)  # fmt: skip

LANGUAGES = ("JavaScript", "Java", "C", "C++", "Go", "Rust", "Ruby", "TypeScript", "Bash", "SQL", "HTML and CSS")
_CODE = """
a bank account; a library of books; a shopping cart; a to-do list; a weather report; a chess board; a bouncing ball;
an address book; a calendar; a student's grades; a parking lot; a vending machine; a playlist; a thermostat; a game of
tic-tac-toe; a quiz; a calculator; a currency converter; a file of log lines; a CSV file; a JSON document; a web page;
a queue of jobs; a linked list; a binary tree; a graph; a matrix; a polygon; a deck of cards; dice; a password; an
email address; a URL; a date; a temperature; a word count; a sorted list; a set of intervals; a priority queue; a
cache; a stopwatch; a chat room; a blog; an inventory; an elevator; a robot on a grid; a maze; a sudoku; a text
adventure; a tax form; a recipe; a bus timetable; a family tree; a phone bill; a voting system; a histogram; a bar
chart; a scatter plot
"""
CODE_SUBJECTS = tuple(" ".join(thing.split()) for thing in _CODE.split(";"))
CODE_TASKS = (
    "Write a {language} program about {subject}.",
    "Write a class in {language} that represents {subject}.",
    "Write a small {language} example that has to do with {subject}, and explain it line by line.",
    "How would you model {subject} in {language}?",
    "Show me how to test code about {subject} in {language}.",
    "Which data structures are best for {subject}? Show code in {language}.",
    "Write {language} code that validates {subject}.",
    "Write {language} code that prints {subject}.",
    "Write {language} code that reads {subject} from a file.",
    "Write pseudocode for {subject}, then {language} code.",
    "Debugging {subject} in {language}: what usually goes wrong?",
    "Design a REST API for {subject}, with an example in {language}.",
    "Write a SQL table for {subject} and three queries.",
    "Write a function in {language} that sorts {subject}.",
    "Write a function in {language} that finds duplicates in {subject}.",
    "Write a regular expression that has to do with {subject}, and explain it.",
)

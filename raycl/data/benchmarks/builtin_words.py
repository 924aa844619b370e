"""The grammars behind the built-in tasks: templates and word lists, and nothing else.

Kept apart from `builtin` because it is prose, not code: it can be edited, and made easier or
harder, without reading the generator.  The notation is described in `builtin`; every fourth
alternative of a list is seen in the test split only.  All of it was written for this project.
"""

from collections.abc import Mapping

LABELS: Mapping[str, tuple[str, ...]] = {
    "topic": ("sport", "cooking", "finance", "health", "music", "gardening"),
    "sentiment": ("positive", "negative", "mixed", "neutral"),
    "question_type": ("person", "place", "quantity", "date", "reason", "method"),
    "intent": ("book table", "set reminder", "send message", "find route", "play video", "order goods"),
    "entailment": ("yes", "no"),
}
"""Label texts of each task; the keys are the task names in stream order."""

COMMON = """
name = Mara | Ivo | Nadia | Oskar | Lena | Tomas | Ruth | Pavel | Greta | Samir | Edith | Bruno | Kira | Hugo
    | Amina | Felix | Olga | Dario | Wanda | Milo
day = Monday | Tuesday | Wednesday | Thursday | Friday | Saturday | Sunday | Easter
town = Dover | Lisbon | Graz | Leeds | Porto | Bergen | Turin | Utrecht | Malmo | Cork | Split | Ghent
"""

_TOPIC = """
text = {name} {@act} on {day}, {aside}. | {aside_start}, {name} {@act} and thought about {@thing}.
    | Instead of worrying about {!thing}, {name} {@act} for most of {day}.
    | On {day} {name} {@act}, although {name2} had hoped to hear about {!thing}.
    | While {name2} {!act}, the rest of us kept on talking about {@thing} and {@thing2}.
    | {name} asked {name2} about {@thing} again, {aside}.
    | Everyone in {town} was speaking of {@thing}, and only {name} mentioned {!thing}.
    | After {name} {!act}, the whole evening in {town} was about {@thing}, {aside}.
aside = as {name3} had promised | which took longer than planned | to the surprise of {name3}
    | without telling anybody in {town} | much as in the year before | and nobody complained
    | with {name3} watching | long before {name3} came back from {town}
aside_start = Late in the afternoon | With {name3} away in {town} | After a quiet week
    | For the third time this month | To please {name3} | On the way to {town} | Before the guests came
    | Just after breakfast
sport:act = ran the last lap alone | trained for the relay | scored twice before the break
    | lost in straight sets | kept goal for the reserves | joined the rowing crew
    | beat the champion on points | jumped higher than ever | sprinted to the line | argued with the referee
    | swam forty lengths | missed the penalty
sport:thing = the cup final | the new coach | the starting line-up | the broken racket | the marathon
    | the home team | the league table | the stadium | the second half | the long jump | the striker
    | the tournament
cooking:act = stirred the sauce slowly | kneaded the dough | burned the onions | roasted two chickens
    | tasted the broth again | peeled a pile of potatoes | whisked the egg whites | simmered the lentils
    | baked a plum cake | chopped the parsley | salted the dumplings | glazed the ham
cooking:thing = the recipe | the oven | the sharp knife | the gravy | a pinch of saffron | the frying pan
    | the pastry | the stew | the stock pot | the spices | a better dessert | the marinade
finance:act = moved the savings to another bank | paid off the loan | sold the last shares
    | compared mortgage rates | checked the pension fund | filed the tax return | lost money on bonds
    | haggled over the insurance premium | balanced the books | opened a deposit account | wrote off the debt
    | traded currencies
finance:thing = the interest rate | the stock market | the budget | the dividend | the unpaid invoice
    | the credit card | inflation | the auditor | the exchange rate | the monthly rent | the investment
    | the overdraft
health:act = saw the doctor about a cough | had a tooth pulled | took the tablets at last
    | waited for the blood test | rested a sprained ankle | had a fever | asked for a vaccine
    | rubbed ointment on the rash | measured the pulse | stayed in the ward | got new glasses
    | recovered from the flu
health:thing = the prescription | the surgeon | the headache | the bandage | the clinic | the allergy
    | the waiting room | the X-ray | the sore throat | the nurse | the bad back | the diagnosis
music:act = tuned the old violin | sang in the choir | practised scales | drummed on the table
    | learned a waltz by heart | hummed the melody | recorded a ballad | strummed the guitar
    | rehearsed with the quartet | played the slow movement | conducted the band | wrote a song
music:thing = the concert | the piano | the chorus | the cello | the brass section | the new album
    | the rhythm | the opera | the trumpet | the string trio | the lyrics | the symphony
gardening:act = pruned the roses | dug over the bed | watered the seedlings | raked the lawn
    | planted a row of beans | pulled up the weeds | trimmed the hedge | repotted the geraniums
    | spread compost | sowed the carrots | tied up the tomatoes | mulched the borders
gardening:thing = the greenhouse | the slugs | the apple tree | the flower bed | the wheelbarrow | the tulips
    | the dry soil | the trellis | the lavender | the garden hose | the bulbs | the orchard
"""

_SENTIMENT = """
positive = {open} {subject} {good}. | {subject} {good}, and {extra_good}. | {fear_bad}, yet {subject} {good}.
    | {name} was sceptical, but I must say that {subject} {good}. | {subject} {good}, {plain_tail}.
    | I bring friends from {town} because {subject} {good}. | {open} {extra_good}, and {subject} {good}.
    | Whatever {name} claims, {subject} {good}.
negative = {open} {subject} {bad}. | {subject} {bad}, and {extra_bad}. | {hope_good}, yet {subject} {bad}.
    | {name} was enthusiastic, but I must say that {subject} {bad}. | {subject} {bad}, {plain_tail}.
    | I warn friends from {town} because {subject} {bad}. | {open} {extra_bad}, and {subject} {bad}.
    | Whatever {name} claims, {subject} {bad}.
mixed = {subject} {good}, but {extra_bad}. | {subject} {bad}, though {extra_good}.
    | {open} {subject} {good}; {extra_bad}. | {extra_good}, and still {subject} {bad}.
    | {open} {extra_bad}, while {subject} {good}. | {subject} {good} at first, and then {extra_bad}.
    | Half of it was fine: {extra_good}. Then {extra_bad}.
    | {extra_bad}, which is a pity, as {subject} {good}.
neutral = {open} {subject} {plain}. | {subject} {plain}, {plain_tail}.
    | {name} told me that {subject} {plain}. | {subject} {plain}, and {extra_plain}.
    | {open} {extra_plain}, {plain_tail}. | In {town}, {subject} {plain}.
    | As {name} noted, {subject} {plain} and {extra_plain}. | {extra_plain}; {subject} {plain}.
open = Last {day} | This time | On our visit to {town} | As before, | When {name} and I went, | To sum up,
    | In the end | After the holidays
subject = the hotel | the film | the restaurant | the bus tour | the phone | the novel | the concert
    | the course | the bakery | the headset | the museum | the app
good = was a joy from start to finish | went far beyond what we hoped | was not bad at all | left us smiling
    | was worth every cent | had nothing I would change | won me over within minutes | turned out splendid
    | was hard to fault | made our week | could not have been better | was a small miracle
bad = was a waste of an evening | fell short in every way | was not good at all | left us fuming
    | was hardly worth the fare | had nothing I would keep | lost me within minutes | turned out dreadful
    | was hard to bear | spoiled our week | could not have been worse | was a shambles
plain = opens at nine | belongs to a larger group | was mentioned in the letter | has two entrances
    | is sold in three sizes | was started in spring | comes with a leaflet | is listed in the guide
    | lasts about an hour | is next to the station | was moved to {day} | is run by {name2}
extra_good = the staff were charming | the price was a pleasant surprise | everything simply worked
    | I felt welcome | the little details were lovely | we laughed a lot | it was beautifully done
    | help came at once
extra_bad = the staff were rude | the price was a nasty surprise | nothing really worked | I felt ignored
    | the little details were sloppy | we were bored stiff | it was carelessly done | help never came
extra_plain = the staff wear blue | the price is on the door | it was the second of three
    | there is a form to fill in | the details are on the website | we sat by the window
    | it was done in {town} | a number is printed on the back
fear_bad = I had feared a flop | {name} had told me to stay away | The reviews were awful | I expected a mess
hope_good = I had hoped for a treat | {name} had told me not to miss it | The reviews were glowing
    | I expected a gem
plain_tail = as {name2} can confirm | just like in {town} | if I remember rightly | as of {day}
    | so I told {name2} | at least on {day} | for the record | in case anyone asks
"""

_QUESTION = """
text = {lead} {@ask}, {tag}? | {lead} {@ask}? {trail} | never mind {!say}. {lead} {@ask}?
    | {trail} {lead} tell me {@say}. | {@ask}? {name3} only told me {!say}. | I heard {!say}, but {@ask}?
    | {trail} Do you happen to know {@say}? | instead of {!say}, {name3} should tell us {@say}.
lead = By the way, | Sorry, | One more thing: | Before we go, | For the quiz, | Since {name} asked: | Please,
    | So,
trail = {name3} knew how it began. | I know when {name3} left, not more.
    | {name3} could not say why it matters. | Where {name3} looked, there was nothing.
    | Who cares what {name3} thinks. | {name3} counted on you. | The guide in {town} was vague.
    | {name3} has forgotten.
tag = if you know | according to {name3} | in your view | as far as we can tell
deed = repaired the {thing} | paid for the {thing} | stole the {thing} | painted the {thing}
    | sold the {thing} | found the {thing} | built the {thing} | broke the {thing}
done = repaired | paid for | stolen | painted | sold | found | built | broken
thing = clock tower | old ferry | silver bell | harbour wall | red piano | town map | stone bridge | iron gate
    | lighthouse lamp | glass roof | wooden horse | mill wheel
person:ask = who {deed} | which artist {deed} | whose idea was the {thing}
    | what is the name of the one who {deed} | which of the neighbours {deed}
    | to whom does the {thing} belong | what was the culprit called who {deed}
    | under which captain was the {thing} {done}
person:say = who {deed} | the name of the one who {deed} | whose {thing} it was | which citizen {deed}
place:ask = where was the {thing} {done} | in which village was the {thing} {done}
    | what country did the {thing} come from | from which harbour was the {thing} brought
    | which street has the {thing} | in what part of {town} is the {thing} | what city keeps the {thing}
    | to which museum did the {thing} go
place:say = where they {deed} | the town in which {name} {deed} | which valley the {thing} came from
    | the spot at which somebody {deed}
quantity:ask = how many people {deed} | how much did the {thing} cost | how heavy is the {thing}
    | what is the height of the {thing} | what did {name} pay for the {thing} | how far is it to the {thing}
    | what share of the {thing} was {done} | at what price was the {thing} {done}
quantity:say = how many times they {deed} | the weight of the {thing} | how tall the {thing} is
    | the length of the {thing}
date:ask = when was the {thing} {done} | in which year was the {thing} {done}
    | on what day was the {thing} {done} | since when has the {thing} been gone
    | what century does the {thing} come from | in which month was the {thing} {done}
    | how long ago was the {thing} {done} | at what hour was the {thing} {done}
date:say = when they {deed} | the year in which {name} {deed} | which season it was when {name} {deed}
    | the day on which they {deed}
reason:ask = why was the {thing} {done} | what made {name} say that they {deed}
    | for what purpose was the {thing} {done} | how come {name} {deed}
    | what was the cause when the {thing} was {done} | what led {name} to the {thing}
    | what is the point of the {thing} | on what grounds was the {thing} {done}
reason:say = why they {deed} | the motive of those who {deed} | what for {name} {deed}
    | what drove {name} when they {deed}
method:ask = how was the {thing} {done} | by what means was the {thing} {done}
    | with which tool was the {thing} {done} | in what way was the {thing} {done}
    | what steps does it take until the {thing} is {done} | how does one get the {thing} {done}
    | what trick helped when the {thing} was {done} | what technique was used when they {deed}
method:say = how they {deed} | the way in which {name} {deed} | how to get the {thing} {done}
    | the method by which they {deed}
"""

_INTENT = """
text = {polite} {@want}{close} | {before} {polite} {@want}{close} | {polite} {@want}{close} {after}
    | {before} {@need}. | {@need}, {because}. | {@need}. {after} | {before} {@need}, {because}.
    | {polite} {@want}, {because}.
polite = Could you | Please | Would you | I want you to | Be so kind and | Can you quickly | Go ahead and
    | Time to
close = , please. | , thanks. | . | , if you can.
before = yesterday it was: {!want}. Today: | No need to {!want} any more.
    | {name3} would have said: {!want}. Not me. | {name3} is coming from {town}. | I am in a hurry.
    | It is {day} already. | Forget what I said before. | Hello again.
after = Forget my earlier wish to {!want}. | Later I may ask you to {!want}. | That is all for {day}.
    | {name3} is waiting. | Do not {!want} today. | We are in {town}. | Thanks in advance.
    | Last time it worked.
because = since {name3} forgot | as it is nearly {day} | now that nobody has to {!want}
    | in case {town} is crowded
book table:want = book a table for two | reserve seats at the bistro | get us a place at the grill for {day}
    | find a free table at the pizzeria | hold a corner table for {name} | save four chairs at the tavern
    | ask the steak house for a spot on {day} | secure a dinner slot in {town}
book table:need = we need a table for {day} | {name} and I would like to eat out on {day}
    | a dinner for six in {town} would be good | there should be room for us at the diner
set reminder:want = remind me of the dentist | wake me at six on {day} | set an alarm for the meeting
    | nudge me about the rent | make sure I remember the birthday of {name} | put the deadline in my calendar
    | alert me before the train leaves | jog my memory on {day}
set reminder:need = I must not forget to water the plants | I keep missing the call with {name}
    | the pills are due at noon on {day} | I always oversleep on {day}
send message:want = text {name} that I am late | write a mail to {name} | tell {name} the news from {town}
    | drop {name} a line | let {name} know about {day} | answer the note from {name}
    | forward the photo to {name} | pass my greetings on to {name}
send message:need = {name} has to hear that we are late | {name} still waits for my answer
    | I owe {name} a few lines | somebody should inform {name} about {day}
find route:want = show me the way to {town} | find the fastest road to the airport | guide me home from {town}
    | map a walk to the harbour | tell me which bus goes to {town} | avoid the toll road to {town}
    | plot a course around the traffic | get me to the station
find route:need = I am lost somewhere near {town} | I have no idea how to get to {town}
    | the motorway to {town} seems closed | we have to be in {town} by car before noon
play video:want = play the next episode | put on a cartoon for {name} | start the film from last {day}
    | stream the match on the big screen | show the clip from {town} | resume the series
    | turn on a documentary | switch the screen to the trailer
play video:need = we feel like watching a comedy | {name} would love to see the new film
    | it is time for our favourite show | a thriller would be nice on {day}
order goods:want = order more coffee | buy a pair of boots | add batteries to the basket
    | get a new charger delivered | purchase the blue lamp | reorder the cat food
    | check out with the cheaper kettle | send for a box of pens
order goods:need = we are out of soap | my headphones broke and I need others
    | {name} wants a raincoat delivered by {day} | the printer has no ink left
"""

_ENTAILMENT = """
yes = {told} {ask} {fact.1}?
no = {denied} {ask} {fact.1}? | {refuted} {ask} {fact.1}? | {told} {ask} {fact.2}?
ask = Question: | So, | Well, | Tell me,
told = {name} {fact.0} {end} | in {town}, {name} {fact.0}. | as {name2} wrote, {name} {fact.0}.
    | we all saw that {name} {fact.0}. | on {day}, {name} {fact.0}. | {name} {fact.0}, and {name2} knew it.
end = in {town}. | on {day}. | after all. | with {name3}. | near {town}. | once again. | at last. | before lunch.
denied = it is not true that {name} {fact.0}. | it is false that {name} {fact.0} {end}
    | nobody should believe that {name} {fact.0}. | it is a myth that {name} {fact.0} {end}
refuted = the story that {name} {fact.0} is wrong. | {name2} was mistaken to think that {name} {fact.0}.
    | {name2} wrongly claims that {name} {fact.0}. | {name2} only dreamed that {name} {fact.0}.
fact = sold the car~did {name} hand over the car~did {name} keep the car
    | slept until noon~was {name} in bed at ten~did {name} get up early
    | passed the exam~did {name} do well in the exam~did {name} fail the exam
    | bought a trout~did {name} buy a fish~did {name} buy a bird
    | drank hot coffee~did {name} have a warm drink~did {name} have a cold drink
    | shouted the answer~was {name} loud~was {name} silent
    | laughed all evening~was {name} cheerful~was {name} gloomy
    | planted a rose~did {name} plant a flower~did {name} plant a tree
    | lost the keys~were the keys gone~did {name} still have the keys
    | told the truth~was {name} honest~was {name} a liar
    | cut the rope~was the rope in two pieces~was the rope in one piece
    | locked the gate~was the gate shut~was the gate open
    | burned the letter~was the letter destroyed~could one still read the letter
    | adopted a puppy~did {name} get a dog~did {name} get a cat
    | quit the choir~did {name} leave the group~did {name} go on singing there
    | washed the shirt~was the shirt clean~was the shirt dirty
"""

GRAMMARS: Mapping[str, str] = {
    "topic": _TOPIC,
    "sentiment": _SENTIMENT,
    "question_type": _QUESTION,
    "intent": _INTENT,
    "entailment": _ENTAILMENT,
}
"""Grammar source of each task; `COMMON` is appended to every one."""

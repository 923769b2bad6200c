"""`slotstream web`: two screens for a browser, in a process of its own. A client of the Samples service; nobody imports it.

settings     what the operator said, checked
sessions     who is logged in, and who guessed wrong
guard        what holds for every request and every answer: Host, Origin, headers
connections  how long a connection may be silent
site         the pages by address: who may see which
window       some rows of a sample and their figures; `measuring` computes them
pieces       tokens as text, the map as SVG, code to copy
"""

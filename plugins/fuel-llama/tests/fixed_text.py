"""A plain text, written for this suite, over which the real models' perplexity is taken."""

TEXT = """\
The lighthouse at the end of the bay had not been lit for eleven years when Marta came to look after it. The keeper
before her had left a ladder, two lamps, a shelf of tide tables and a note that said the stairs were safe as far as the
second window. She believed the note, because it was short, and because people who lie about stairs usually add that
there is nothing to worry about.

On the first morning she swept the floor and found a coin under the stove. On the second morning she painted the door.
By the end of the week she knew that the wind came from the west before noon and from the south after it, that the gulls
preferred the northern wall, and that the boat from the village brought bread on Tuesdays and letters whenever the sea
allowed it. Nobody had told her any of this. She wrote it down in a notebook, with the date and the hour, since she had
been taught that what is not written down has to be learned twice.

The lamp itself was a simple machine. A tank held the oil, a wick carried it up, and a glass as tall as a child bent the
light into a narrow beam. To turn the glass, a weight on a chain sank slowly through the middle of the tower and drove a
set of wheels. Every four hours somebody had to wind the weight up again. If the keeper slept through the hour, the beam
stood still, and a ship that saw a light standing still would take it for a window in a house and steer accordingly.

Marta thought about this for a long time. The old keeper had tied a bell to the chain, so that it rang when the weight
was near the floor, but the bell had rusted and made no more noise than a spoon in a cup. She could have bought another
one. Instead she measured how far the weight sank in an hour, divided the height of the tower by that number, and found
that a chain one third longer would run from dusk until dawn in every season except the middle of winter. The smith in
the village made the chain in three days and charged her for two, because he had a brother at sea.

In the autumn the first storm came. It broke a shutter, carried off the ladder and filled the lower room with sand, but
the light went round and round above it all, once in every twenty seconds, as it was supposed to do. In the morning a
fishing boat lay in the shelter of the point. Its captain walked up the path with a basket of fish and asked who had
mended the light. Marta said that it had not been broken; it had only been waiting for somebody to do the arithmetic.
"""

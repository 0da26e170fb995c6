//! Generates mutations of valid inputs.

use burn_megatron::kernels::philox::Stream;

/// Numbers at which arithmetic may overflow.
const EDGES: [u64; 10] = [
    0,
    1,
    0x7f,
    0xff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 40,
    i64::MAX as u64,
    u64::MAX,
];

/// An endless iterator over mutations of some inputs. It is deterministic for a given seed.
pub struct Mutations {
    seeds: Vec<Vec<u8>>,
    stream: Stream,
    drawn: u64,
}

impl Mutations {
    /// Creates mutations of `seeds`, which must not be empty.
    pub fn new(seeds: Vec<Vec<u8>>, seed: u64) -> Self {
        assert!(!seeds.is_empty(), "no inputs to mutate");
        Self {
            seeds,
            stream: Stream::new(seed, 0),
            drawn: 0,
        }
    }

    /// Returns a random number below `below`, or 0.
    fn draw(&mut self, below: usize) -> usize {
        let mut drawn = 0;
        self.stream.words(self.drawn, 1, |_, word| drawn = word);
        self.drawn += 1;
        ((u64::from(drawn) * below as u64) >> 32) as usize
    }

    fn edge(&mut self) -> u64 {
        EDGES[self.draw(EDGES.len())]
    }

    /// Returns a random range of an input of this length.
    fn range(&mut self, len: usize) -> std::ops::Range<usize> {
        let start = self.draw(len + 1);
        let most = (len - start).min(1 + self.draw(32));
        start..start + most
    }

    fn mutate(&mut self, input: &mut Vec<u8>) {
        let len = input.len();
        match self.draw(9) {
            0 if len > 0 => {
                let at = self.draw(len);
                input[at] ^= 1 << self.draw(8);
            }
            1 if len > 0 => {
                let at = self.draw(len);
                input[at] = self.edge() as u8;
            }
            2 => {
                let (at, edge) = (self.draw(len + 1), self.edge());
                let bytes = edge.to_le_bytes();
                let width = [1, 2, 4, 8][self.draw(4)].min(len - at);
                input[at..at + width].copy_from_slice(&bytes[..width]);
            }
            3 => drop(input.drain(self.range(len))),
            4 => input.truncate(self.draw(len + 1)),
            5 => {
                let copy = input[self.range(len)].to_vec();
                let at = self.draw(len + 1);
                input.splice(at..at, copy);
            }
            6 => self.change_number(input),
            7 => {
                let number = self.draw(self.seeds.len());
                let other = self.seeds[number].clone();
                let part = other[self.range(other.len())].to_vec();
                let at = self.range(len);
                input.splice(at, part);
            }
            _ => {
                const MARKS: &[u8] = b"{}[]\",:=\n\0\xff-. eE";
                let (at, mark) = (self.draw(len + 1), MARKS[self.draw(MARKS.len())]);
                input.insert(at, mark);
            }
        }
    }

    /// Replaces a number in the text by another number.
    fn change_number(&mut self, input: &mut Vec<u8>) {
        let from = self.draw(input.len() + 1);
        let Some(start) = input[from..].iter().position(u8::is_ascii_digit) else {
            return;
        };
        let start = from + start;
        let digits = input[start..].iter().take_while(|b| b.is_ascii_digit());
        let end = start + digits.count();
        let number = match self.draw(3) {
            0 => format!("-{}", self.edge()),
            1 => format!("{}e99", self.edge()),
            _ => self.edge().to_string(),
        };
        input.splice(start..end, number.into_bytes());
    }
}

impl Iterator for Mutations {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        let number = self.draw(self.seeds.len());
        let mut input = self.seeds[number].clone();
        for _ in 0..=self.draw(4) {
            self.mutate(&mut input);
        }
        Some(input)
    }
}

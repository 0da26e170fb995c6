//! A random number generator that produces the same numbers as NumPy's `RandomState`.

/// The number of words of the state.
const N: usize = 624;
/// The offset of the word that a new word is combined with.
const M: usize = 397;

/// The Mersenne Twister MT19937. It shuffles like `numpy.random.RandomState(seed).shuffle`. Source: Matsumoto and
/// Nishimura, "Mersenne Twister: a 623-dimensionally equidistributed uniform pseudorandom number generator", ACM TOMACS
/// 8(1), 1998.
#[derive(Clone)]
pub struct RandomState {
    words: [u32; N],
    /// The index of the next word.
    next: usize,
}

impl RandomState {
    /// Creates a generator with a seed.
    pub fn new(seed: u32) -> Self {
        let mut words = [seed; N];
        for i in 1..N {
            let before = words[i - 1] ^ (words[i - 1] >> 30);
            words[i] = before.wrapping_mul(1_812_433_253).wrapping_add(i as u32);
        }
        Self { words, next: N }
    }

    /// Returns the next 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.next == N {
            self.renew();
        }
        let mut word = self.words[self.next];
        self.next += 1;
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c_5680;
        word ^= (word << 15) & 0xefc6_0000;
        word ^ (word >> 18)
    }

    /// Returns the next 64 random bits. The upper half is generated first.
    pub fn next_u64(&mut self) -> u64 {
        let upper = u64::from(self.next_u32()) << 32;
        upper | u64::from(self.next_u32())
    }

    /// Returns a uniformly distributed number from 0 to `max`, with rejection sampling. It draws numbers that have the
    /// same number of bits as `max`, until a number is at most `max`.
    pub fn up_to(&mut self, max: u64) -> u64 {
        let mask = match max.checked_ilog2() {
            Some(bits) => u64::MAX >> (63 - bits),
            None => return 0,
        };
        loop {
            let drawn = match u32::try_from(max) {
                Ok(_) => u64::from(self.next_u32()),
                Err(_) => self.next_u64(),
            };
            if drawn & mask <= max {
                return drawn & mask;
            }
        }
    }

    /// Shuffles the values in place with the Fisher-Yates algorithm, from the last value to the first value.
    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        for last in (1..values.len()).rev() {
            let other = self.up_to(last as u64) as usize;
            values.swap(last, other);
        }
    }

    fn renew(&mut self) {
        for i in 0..N {
            let (this, next) = (self.words[i], self.words[(i + 1) % N]);
            let bits = (this & 0x8000_0000) | (next & 0x7fff_ffff);
            let odd = if bits & 1 == 1 { 0x9908_b0df } else { 0 };
            self.words[i] = self.words[(i + M) % N] ^ (bits >> 1) ^ odd;
        }
        self.next = 0;
    }
}

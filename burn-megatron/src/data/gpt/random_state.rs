//! The random numbers of NumPy's `RandomState`.

/// Words of the state.
const N: usize = 624;
/// How far the word lies that a new one is made with.
const M: usize = 397;

/// A Mersenne Twister, MT19937 (Matsumoto and Nishimura, "Mersenne Twister: a 623-dimensionally
/// equidistributed uniform pseudorandom number generator", ACM TOMACS 8(1), 1998), which shuffles as
/// `numpy.random.RandomState(seed).shuffle` does.
#[derive(Clone)]
pub struct RandomState {
    words: [u32; N],
    /// The next of them.
    next: usize,
}

impl RandomState {
    /// The generator of a seed.
    pub fn new(seed: u32) -> Self {
        let mut words = [seed; N];
        for i in 1..N {
            let before = words[i - 1] ^ (words[i - 1] >> 30);
            words[i] = before.wrapping_mul(1_812_433_253).wrapping_add(i as u32);
        }
        Self { words, next: N }
    }

    /// The next 32 bits.
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

    /// The next 64 bits: the upper half is drawn first.
    pub fn next_u64(&mut self) -> u64 {
        let upper = u64::from(self.next_u32()) << 32;
        upper | u64::from(self.next_u32())
    }

    /// A number from 0 to `max`, each as likely as the others: as many bits as `max` has are drawn until
    /// they are not above it.
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

    /// Puts values into a random order (Fisher and Yates), from the last to the first.
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

//! Codes and values from other implementations, written by `tests/fixtures/fp8/make.py`.

/// The known values and codes of a format.
pub(super) struct Fixture {
    /// Bits of the value of each code.
    pub decode: Vec<u32>,
    /// The bits of a value, and its codes. A value has one code. In E8M0 it has two codes: the nearest code and the
    /// code that is rounded up.
    pub encode: Vec<(u32, Vec<u8>)>,
}

impl Fixture {
    pub fn parse(text: &str) -> Self {
        let number = |text| u32::from_str_radix(text, 16).expect("a hexadecimal number");
        let mut lines = text.lines().filter(|line| !line.starts_with('#'));
        assert_eq!(lines.next(), Some("decode"));
        let decode: Vec<_> = lines
            .by_ref()
            .take_while(|line| *line != "encode")
            .map(|line| line.split_once(' ').expect("a code and its value"))
            .enumerate()
            .map(|(at, (code, value))| {
                assert_eq!(number(code), at as u32);
                number(value)
            })
            .collect();
        let encode: Vec<_> = lines
            .map(|line| {
                let mut numbers = line.split(' ').map(number);
                let value = numbers.next().expect("a value");
                (value, numbers.map(|code| code as u8).collect())
            })
            .collect();
        assert!(decode.len() >= 16 && encode.len() > 100);
        Self { decode, encode }
    }

    pub fn values(&self) -> Vec<f32> {
        self.encode
            .iter()
            .map(|(bits, _)| f32::from_bits(*bits))
            .collect()
    }

    pub fn codes(&self, column: usize) -> Vec<u8> {
        self.encode.iter().map(|(_, codes)| codes[column]).collect()
    }
}

use super::*;

/// Frequencies before, in and after the smoothed range, which is pairs 29 to 34.
const LLAMA: [(usize, f64); 7] = [
    (0, 1.0),
    (28, 0.003_211_445_994_752_591_3),
    (29, 0.002_166_570_763_503_36),
    (32, 0.000_524_846_160_992_955_1),
    (34, 0.000_178_507_812_767_996_65),
    (35, 9.556_212_353_964_687e-5),
    (63, 3.068_925_988_914_512_7e-7),
];

/// The frequencies are `10000^(-2i / 64)`, divided by 40 from pair 23 on. Pair 16 is 0.01 * (6 / 40 + 7) / 13.
const YARN: [(usize, f64); 7] = [
    (0, 1.0),
    (10, 0.056_234_132_519_034_905),
    (11, 0.039_006_926_567_143_86),
    (16, 0.005_5),
    (22, 0.000_177_827_941_003_892_2),
    (23, 3.333_803_580_408_31e-5),
    (31, 3.333_803_580_408_31e-6),
];

/// Frequencies of gpt-oss in f64, from an independent formula.
const GPT_OSS: [(usize, f64); 9] = [
    (1, 6.890443058881632e-01),
    (8, 5.081327481546147e-02),
    (9, 3.170569618466377e-02),
    (12, 6.794959489732219e-03),
    (13, 3.860359317192068e-03),
    (16, 4.564839192232409e-04),
    (17, 1.293187012450632e-04),
    (18, 3.830881237375338e-05),
    (31, 3.023511428119214e-07),
];

fn assert_frequencies(config: &RopeConfig, expected: &[(usize, f64)]) {
    let frequencies = config.frequencies().unwrap();
    assert_eq!(frequencies.len(), config.width / 2);
    for (pair, expected) in expected {
        let actual = frequencies[*pair];
        let relative = (actual / expected - 1.0).abs();
        assert!(
            relative < 1e-12,
            "pair {pair}: {actual:e} should be {expected:e}"
        );
    }
}

/// The published settings of Llama 3.1. Pair 32 was computed by hand: 500000^-0.5 is 1 / 707.1, so 8192 positions make
/// 1.8438 full rotations. The result is 0.28128 of the frequency plus 0.71872 of an eighth of the frequency.
#[test]
fn llama_3_frequencies_are_the_known_ones() {
    let scaling = Scaling::Llama3 {
        factor: 8.0,
        low: 1.0,
        high: 4.0,
        original: 8192,
    };
    let config = RopeConfig {
        width: 128,
        max_positions: 131_072,
        base: 500_000.0,
        scaling,
    };
    assert_frequencies(&config, &LLAMA);
    assert_eq!(config.concentration(), 1.0);
}

/// The published settings of DeepSeek-V2. The transition goes from pair 10 (10.47 rounded down) to pair 23 (22.51
/// rounded up). Computed by hand, these numbers are `64 ln(4096 / (2 pi r)) / (2 ln 10000)` for 32 and 1 full
/// rotations.
#[test]
fn yarn_frequencies_are_the_known_ones() {
    let scaling = |mscale, mscale_all_dim| Scaling::Yarn {
        factor: 40.0,
        original: 4096,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale,
        mscale_all_dim,
        truncate: true,
        attention_factor: None,
    };
    let config = |scaling| RopeConfig {
        width: 64,
        max_positions: 163_840,
        base: 10_000.0,
        scaling,
    };
    assert_frequencies(&config(scaling(1.0, 1.0)), &YARN);
    assert_eq!(config(scaling(0.707, 0.707)).concentration(), 1.0);
    let only = config(scaling(1.0, 0.0)).concentration();
    assert!((only - 1.368_887_945_411_393_7).abs() < 1e-15, "{only}");
}

/// The settings of gpt-oss, whose transition goes from 8.0928 to 17.3980, and the settings of Gemma 3.
#[test]
fn a_ramp_that_is_not_rounded_and_a_divisor_of_all() {
    let config = RopeConfig {
        width: 64,
        max_positions: 131_072,
        base: 150_000.0,
        scaling: Scaling::Yarn {
            factor: 32.0,
            original: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: 1.0,
            mscale_all_dim: 0.0,
            truncate: false,
            attention_factor: None,
        },
    };
    assert_frequencies(&config, &GPT_OSS);
    assert!((config.concentration() - 1.346_573_590_279_972_7).abs() < 1e-15);
    let plain = RopeConfig {
        scaling: Scaling::None,
        ..config.clone()
    };
    let divided = RopeConfig {
        scaling: Scaling::Linear { factor: 8.0 },
        ..config
    };
    let pairs = plain.frequencies().unwrap().into_iter().enumerate();
    let wanted: Vec<_> = pairs
        .map(|(pair, frequency)| (pair, frequency / 8.0))
        .collect();
    assert_frequencies(&divided, &wanted);
}

fn long_rope(max_positions: usize) -> RopeConfig {
    RopeConfig {
        width: 8,
        max_positions,
        base: 100.0,
        scaling: Scaling::LongRope {
            short_factor: vec![1.0, 1.1, 1.25, 1.5],
            long_factor: vec![1.5, 2.5, 4.0, 8.0],
            original: 16,
            attention_factor: 1.1534652243227104,
        },
    }
}

/// The numbers are position 15 of `LlamaRotaryEmbedding` in `transformers` 5.24, in f32, for sequences of 16 and 17
/// tokens.
#[test]
fn the_length_of_a_sequence_chooses_the_factors_of_long_rope() {
    let short = [
        [-0.8762736, -0.4493853, 0.4179672, 1.0962710],
        [0.7500845, -1.0623252, 1.0750747, 0.3587087],
    ];
    let long = [
        [-0.9678398, -0.3700278, 1.0733082, 1.1514382],
        [-0.6275095, 1.0925025, 0.4224826, 0.0683520],
    ];
    let assert_near = |table: &RopeTable, length: usize, expected: [[f64; 4]; 2]| {
        let (cosine, sine) = table.parts();
        for (part, expected) in [cosine, sine].into_iter().zip(expected) {
            let row = part.narrow(0, table.first_row(length) + 15, 1);
            for (found, expected) in values(row).into_iter().zip(expected) {
                assert!((found - expected).abs() < 2e-6, "{found} and {expected}");
            }
        }
    };
    let device = Device::flex();
    let table = |positions| RopeTable::new(&long_rope(positions), &device, DType::F64).unwrap();
    let both = table(40);
    assert_eq!((both.max_positions(), both.rows()), (40, 56));
    for (length, expected) in [(1, short), (16, short), (17, long), (40, long)] {
        assert_near(&both, length, expected);
    }
    // This model does not support sequences that are longer than the original context.
    let only_short = table(16);
    assert_eq!((only_short.rows(), only_short.short_rows()), (16, None));
    assert_near(&only_short, 16, short);
    let moved = both.to_device(&device);
    assert_eq!(moved.short_rows(), Some(40..56));
}

/// Compares the table with complex powers: position `p` is the `p`-th power of `e^(i frequency)`.
#[test]
fn the_table_is_powers_of_complex_numbers() {
    let scaling = Scaling::Yarn {
        factor: 4.0,
        original: 16,
        beta_fast: 2.0,
        beta_slow: 0.2,
        mscale: 1.0,
        mscale_all_dim: 0.0,
        truncate: true,
        attention_factor: None,
    };
    let config = RopeConfig {
        width: 8,
        max_positions: 40,
        base: 100.0,
        scaling,
    };
    for (device, dtypes) in devices() {
        for dtype in dtypes {
            let table = RopeTable::new(&config, &device, dtype).unwrap();
            let stored = if dtype == DType::F64 {
                DType::F64
            } else {
                DType::F32
            };
            assert_eq!((table.dtype(), table.width()), (stored, 8));
            assert_eq!(
                (table.max_positions(), table.device()),
                (40, device.clone())
            );
            let bound = if dtype == DType::F64 { 1e-13 } else { 1e-7 };
            let (cosine, sine) = table.parts();
            let (cosine, sine) = (values(cosine), values(sine));
            for (pair, frequency) in config.frequencies().unwrap().iter().enumerate() {
                let step = (frequency.cos(), frequency.sin());
                let mut power = (0.1 * 4f64.ln() + 1.0, 0.0);
                for position in 0..40 {
                    let at = position * 4 + pair;
                    let apart = (cosine[at] - power.0).abs().max((sine[at] - power.1).abs());
                    assert!(apart < bound, "position {position}, pair {pair}: {apart:e}");
                    power = (
                        power.0 * step.0 - power.1 * step.1,
                        power.0 * step.1 + power.1 * step.0,
                    );
                }
            }
        }
    }
}

#[test]
fn a_table_moves_between_devices() {
    for (device, _) in devices() {
        let table = RopeTable::new(&config(6, 9), &Device::flex(), DType::F32).unwrap();
        let moved = table.clone().to_device(&device);
        assert_eq!(moved.device(), device);
        let apart = |part: fn(&RopeTable) -> Tensor<2>| {
            part(&table)
                .into_data()
                .assert_eq(&part(&moved).into_data(), true);
        };
        apart(|table| table.parts().0);
        apart(|table| table.parts().1);
    }
}

#[test]
fn configurations_that_make_no_sense_are_refused() {
    let plain = config(8, 4);
    let llama = |low, high| Scaling::Llama3 {
        factor: 8.0,
        low,
        high,
        original: 8192,
    };
    let yarn = |factor, original, mscale| Scaling::Yarn {
        factor,
        original,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale,
        mscale_all_dim: 0.0,
        truncate: true,
        attention_factor: None,
    };
    let long_rope = |short: &[f64], long: &[f64], original, attention_factor| Scaling::LongRope {
        short_factor: short.to_vec(),
        long_factor: long.to_vec(),
        original,
        attention_factor,
    };
    let ones = [1.0; 4];
    let scaled = |scaling| RopeConfig { scaling, ..plain };
    let refused = [
        (
            RopeConfig {
                width: 7,
                ..plain.clone()
            },
            "rope: invalid width = 7: expected a positive even number",
        ),
        (
            RopeConfig {
                width: 0,
                ..plain.clone()
            },
            "rope: invalid width = 0",
        ),
        (
            RopeConfig {
                max_positions: 0,
                ..plain.clone()
            },
            "rope: invalid max_positions = 0",
        ),
        (
            RopeConfig {
                base: 1.0,
                ..plain.clone()
            },
            "rope: invalid base = 1: expected a finite number above 1",
        ),
        (
            RopeConfig {
                base: f64::NAN,
                ..plain.clone()
            },
            "rope: invalid base = NaN",
        ),
        (
            RopeConfig {
                max_positions: 1 << 40,
                ..plain.clone()
            },
            "rope: tensor [1099511627776, 4] has too many",
        ),
        (scaled(llama(4.0, 1.0)), "rope: invalid high = 1"),
        (scaled(llama(0.0, 1.0)), "rope: invalid low = 0"),
        (scaled(yarn(0.5, 16, 1.0)), "rope: invalid factor = 0.5"),
        (scaled(yarn(2.0, 0, 1.0)), "rope: invalid original = 0"),
        (
            scaled(yarn(2.0, 16, f64::NAN)),
            "rope: invalid mscale = NaN",
        ),
        (
            scaled(long_rope(&ones[..3], &ones, 2, 1.0)),
            "rope: invalid short_factor = 3 factors for 8 features: expected one factor for each pair of features",
        ),
        (
            scaled(long_rope(&ones, &[1.0, 1.0, 0.0, 1.0], 2, 1.0)),
            "rope: invalid long_factor = a list with 0: expected numbers above 0 and finite in f32",
        ),
        (
            scaled(long_rope(&ones, &ones, 0, 1.0)),
            "rope: invalid original = 0",
        ),
        (
            scaled(long_rope(&ones, &ones, 2, f64::INFINITY)),
            "rope: invalid attention_factor = inf: expected a number above 0 and finite in f32",
        ),
    ];
    for (config, message) in refused {
        let error = RopeTable::new(&config, &Device::flex(), DType::F32).unwrap_err();
        assert!(error.to_string().starts_with(message), "{error}");
    }
    let error = RopeTable::new(&plain, &Device::flex(), DType::I32).unwrap_err();
    assert!(
        error.to_string().starts_with("rope does not support I32"),
        "{error}"
    );
}

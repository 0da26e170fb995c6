use super::*;

/// Before, in and after the smoothed range, which is pairs 29 to 34.
const LLAMA: [(usize, f64); 7] = [
    (0, 1.0),
    (28, 0.003_211_445_994_752_591_3),
    (29, 0.002_166_570_763_503_36),
    (32, 0.000_524_846_160_992_955_1),
    (34, 0.000_178_507_812_767_996_65),
    (35, 9.556_212_353_964_687e-5),
    (63, 3.068_925_988_914_512_7e-7),
];

/// `10000^(-2i / 64)`, and a fortieth of it from pair 23 on. Pair 16 is 0.01 * (6 / 40 + 7) / 13.
const YARN: [(usize, f64); 7] = [
    (0, 1.0),
    (10, 0.056_234_132_519_034_905),
    (11, 0.039_006_926_567_143_86),
    (16, 0.005_5),
    (22, 0.000_177_827_941_003_892_2),
    (23, 3.333_803_580_408_31e-5),
    (31, 3.333_803_580_408_31e-6),
];

/// Of gpt-oss, in f64 by a formula of its own.
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

/// Llama 3.1's published setting. Pair 32 by hand: 500000^-0.5 is 1 / 707.1, so 8192 positions make
/// 1.8438 turns, a mixture of 0.28128 of the frequency and 0.71872 of an eighth of it.
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

/// DeepSeek-V2's published setting: the ramp goes from pair 10 (10.47 rounded down) to pair 23
/// (22.51 rounded up), as by hand from `64 ln(4096 / (2 pi r)) / (2 ln 10000)` for 32 and 1 turns.
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

/// gpt-oss, whose ramp goes from 8.0928 to 17.3980, and Gemma 3.
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
        ..config
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

/// The table against complex powers: position `p` is the `p`-th power of `e^(i frequency)`.
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
    let scaled = |scaling| RopeConfig { scaling, ..plain };
    let refused = [
        (
            RopeConfig { width: 7, ..plain },
            "rope: invalid width = 7: expected a positive even number",
        ),
        (RopeConfig { width: 0, ..plain }, "rope: invalid width = 0"),
        (
            RopeConfig {
                max_positions: 0,
                ..plain
            },
            "rope: invalid max_positions = 0",
        ),
        (
            RopeConfig { base: 1.0, ..plain },
            "rope: invalid base = 1: expected a finite number above 1",
        ),
        (
            RopeConfig {
                base: f64::NAN,
                ..plain
            },
            "rope: invalid base = NaN",
        ),
        (
            RopeConfig {
                max_positions: 1 << 40,
                ..plain
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

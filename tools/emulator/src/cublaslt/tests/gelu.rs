//! Compares epilogues with GELU with plain loops, and tests their rules.

use super::numbers::{assert_near, dot, fill, run};
use super::*;
use crate::cublaslt::{INVALID_VALUE, NOT_SUPPORTED};

const GELU_AUX: u64 = 160;
const GELU_AUX_BIAS: u64 = 164;
const DGELU: u64 = 192;
const DGELU_BGRAD: u64 = 208;

/// The number of elements from one column of the auxiliary matrix to the next. Columns of `D` have 7 elements.
const LEADING: u64 = 16;
const SIZES: [usize; 3] = [7, 5, 9];

fn asked(element: Element, epilogue: u64) -> Asked {
    Asked::new([element; 3], SIZES, [true, false], 3)
        .with(of::EPILOGUE, epilogue)
        .with(of::EPILOGUE_AUX_LD, LEADING)
        .with(of::EPILOGUE_AUX_POINTER, 256)
}

/// Computes GELU with the logistic function, which can express tanh.
fn gelu(x: f64) -> f64 {
    let inside = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
    x / (1.0 + (-2.0 * inside).exp())
}

fn slope(x: f64) -> f64 {
    let step = 1e-5;
    (gelu(x + step) - gelu(x - step)) / (2.0 * step)
}

fn place(address: u64, element: Element, row: usize, column: usize) -> u64 {
    address + ((column * LEADING as usize + row) * element.bytes()) as u64
}

/// Checks that a value agrees up to one rounding to the type. Sums of several values in f32 have several roundings.
fn near(element: Element, found: f64, expected: f64) -> bool {
    let unit = match element {
        F32 => 2f64.powi(-19),
        F16 => 2f64.powi(-10),
        _ => 2f64.powi(-7),
    };
    (found - expected).abs() <= unit * (expected.abs() + 0.1)
}

#[test]
fn the_input_of_gelu_is_kept_with_its_bias() {
    let mut seed = 11;
    for element in [F32, F16, BF16] {
        for (epilogue, biased) in [(GELU_AUX, false), (GELU_AUX_BIAS, true)] {
            let memory = Memory::default();
            let mut call = call(asked(element, epilogue).check().unwrap(), &memory);
            let [m, n, _] = SIZES;
            let bytes = element.bytes();
            call.auxiliary = memory
                .allocate(LEADING as usize * n * bytes, u64::MAX)
                .unwrap();
            let mut bias = vec![0.0; m];
            if biased {
                call.bias = memory.allocate(m * bytes, u64::MAX).unwrap();
                for (row, bias) in bias.iter_mut().enumerate() {
                    *bias = put(element, call.bias + (row * bytes) as u64, &mut seed);
                }
            }
            let [a, b] = fill(&call, &mut seed);
            run(&call, &memory);
            let input = |row: usize, column: usize| dot(&a[row], &b[column]) + bias[row];
            assert_near(&call, |row, column| gelu(input(row, column)));
            for column in 0..n {
                for row in 0..LEADING as usize {
                    let found = read(element, place(call.auxiliary, element, row, column));
                    let fits = if row < m {
                        near(element, found, input(row, column))
                    } else {
                        // The gaps between the columns are unchanged.
                        found.is_nan()
                    };
                    assert!(fits, "{element:?} {biased}: {found} at {row}, {column}");
                }
            }
        }
    }
}

#[test]
fn gradients_are_those_of_gelu_and_of_the_bias() {
    let mut seed = 12;
    for element in [F32, F16, BF16] {
        for (epilogue, biased) in [(DGELU, false), (DGELU_BGRAD, true)] {
            let memory = Memory::default();
            let mut call = call(asked(element, epilogue).check().unwrap(), &memory);
            let [m, n, _] = SIZES;
            let bytes = element.bytes();
            call.auxiliary = memory
                .allocate(LEADING as usize * n * bytes, u64::MAX)
                .unwrap();
            let mut kept = vec![vec![0.0; n]; m];
            for (row, kept) in kept.iter_mut().enumerate() {
                for (column, kept) in kept.iter_mut().enumerate() {
                    let address = place(call.auxiliary, element, row, column);
                    *kept = 3.0 * put(element, address, &mut seed);
                    // SAFETY: the address is inside the matrix.
                    unsafe { element.store(address, *kept) };
                    *kept = read(element, address);
                }
            }
            if biased {
                call.bias = memory.allocate(m * bytes, u64::MAX).unwrap();
            }
            let [a, b] = fill(&call, &mut seed);
            run(&call, &memory);
            let gradient =
                |row: usize, column: usize| dot(&a[row], &b[column]) * slope(kept[row][column]);
            assert_near(&call, gradient);
            for row in (0..m).filter(|_| biased) {
                let found = read(element, call.bias + (row * bytes) as u64);
                let expected = (0..n).map(|column| gradient(row, column)).sum();
                let fits = near(element, found, expected);
                assert!(
                    fits,
                    "{element:?}: {found} instead of {expected}, row {row}"
                );
            }
        }
    }
}

#[test]
fn an_auxiliary_matrix_has_rules() {
    let refused = |asked: Asked, status, rule: &str| {
        let refusal = asked.check().expect_err(rule);
        assert!(refusal.rule.contains(rule), "{:?}", refusal.rule);
        assert_eq!(refusal.status, status, "{rule}");
    };
    for epilogue in [GELU_AUX, GELU_AUX_BIAS, DGELU, DGELU_BGRAD] {
        let good = || asked(BF16, epilogue);
        assert!(good().with(of::EPILOGUE_AUX_DATA_TYPE, 14).check().is_ok());
        for (leading, rule) in [
            (0, "EPILOGUE_AUX_LD is 0"),
            (12, "EPILOGUE_AUX_LD is 12: a multiple of 8 of at least 7"),
            (u64::MAX, "EPILOGUE_AUX_LD is negative"),
            (1 << 62, "larger than any memory"),
        ] {
            refused(
                good().with(of::EPILOGUE_AUX_LD, leading),
                INVALID_VALUE,
                rule,
            );
        }
        for address in [0, 8, 264] {
            let asked = good().with(of::EPILOGUE_AUX_POINTER, address);
            refused(asked, INVALID_VALUE, "a multiple of 16 bytes is needed");
        }
        let other = good().with(of::EPILOGUE_AUX_DATA_TYPE, 2);
        refused(
            other,
            NOT_SUPPORTED,
            "the type of the auxiliary matrix is 2",
        );
        refused(asked(F64, epilogue), NOT_SUPPORTED, "D in F64");
        let narrow = Asked::narrow(BF16)
            .with(of::EPILOGUE, epilogue)
            .with(of::EPILOGUE_AUX_LD, 32)
            .with(of::EPILOGUE_AUX_POINTER, 256);
        refused(narrow, NOT_SUPPORTED, "GELU after 8-bit factors");
    }
    let long = Asked::new([BF16; 3], [24, 5, 9], [true, false], 0);
    let long = long.with(of::EPILOGUE, GELU_AUX);
    let long = long.with(of::EPILOGUE_AUX_POINTER, 256);
    let rule = "a multiple of 8 of at least 24 is needed";
    refused(long.with(of::EPILOGUE_AUX_LD, 16), INVALID_VALUE, rule);
}

#[test]
fn addresses_of_an_auxiliary_matrix_are_checked() {
    let memory = Memory::default();
    let product = asked(BF16, DGELU_BGRAD).check().unwrap();
    let new = |bytes| memory.allocate(bytes, u64::MAX).unwrap();
    let mut good = call(product, &memory);
    (good.auxiliary, good.bias) = (new(2 * 16 * 5), new(14));
    let broken = |call: Call| call.check(&algorithm(&call.product)).unwrap_err().rule;
    assert_eq!(good.check(&algorithm(&product)), Ok(()));
    let (auxiliary, d) = (0, good.d);
    assert_eq!(
        broken(Call { auxiliary, ..good }),
        "the auxiliary matrix has no address"
    );
    assert_eq!(
        broken(Call {
            auxiliary: d,
            ..good
        }),
        "D and the auxiliary matrix overlap"
    );
    assert_eq!(broken(Call { bias: 0, ..good }), "the bias has no address");
    let small = Call {
        auxiliary: new(64),
        ..good
    };
    let reason = small.run(&memory).unwrap_err();
    assert!(
        reason.starts_with("the auxiliary matrix has 142 bytes at"),
        "{reason}"
    );
    // The auxiliary matrix is written, so it must not overlap a factor.
    let forward = asked(BF16, GELU_AUX).check().unwrap();
    let of_forward = Call {
        product: forward,
        auxiliary: good.a,
        ..good
    };
    assert_eq!(broken(of_forward), "A and the auxiliary matrix overlap");
}

#[test]
fn what_is_not_computed_is_filled_too() {
    let memory = Memory::default();
    for epilogue in [GELU_AUX, DGELU_BGRAD] {
        let mut call = call(asked(BF16, epilogue).check().unwrap(), &memory);
        call.auxiliary = memory.allocate(2 * 16 * 5, u64::MAX).unwrap();
        call.bias = memory.allocate(14, u64::MAX).unwrap();
        assert_eq!(call.fill(&memory), Ok(()));
        let (found, kept) = if epilogue == GELU_AUX {
            (read(BF16, place(call.auxiliary, BF16, 6, 4)), call.bias)
        } else {
            (read(BF16, call.bias + 12), call.auxiliary)
        };
        assert_eq!(found, 1.0 / 1024.0);
        assert!(read(BF16, kept).is_nan(), "it is not written");
        let name = if epilogue == GELU_AUX {
            "forward"
        } else {
            "gradient"
        };
        assert_eq!(call.line()["gelu"], name);
    }
}

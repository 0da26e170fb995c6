//! Tests that break each rule.

use super::*;
use crate::cublaslt::{INVALID_VALUE, NOT_SUPPORTED};

fn refused(asked: Asked, status: u32, rule: &str) {
    let refusal = asked.check().expect_err(rule);
    assert!(
        refusal.rule.contains(rule),
        "{:?} instead of {rule}",
        refusal.rule
    );
    assert_eq!(refusal.status, status, "{rule}");
}

fn plain() -> Asked {
    Asked::new([BF16, BF16, F32], [6, 10, 12], [true, false], 2)
}

#[test]
fn matrices_that_are_none_or_do_not_belong_together() {
    assert!(plain().check().is_ok());
    refused(
        plain().layout(0, layout::LD, 11),
        INVALID_VALUE,
        "A has 12 rows and the leading",
    );
    refused(
        plain().layout(1, layout::LD, 11),
        INVALID_VALUE,
        "B has 12 rows",
    );
    refused(
        plain().layout(2, layout::LD, 5),
        INVALID_VALUE,
        "C has 6 rows",
    );
    assert!(plain().layout(2, layout::LD, 0).check().is_ok());
    refused(
        plain().layout(3, layout::LD, 0),
        INVALID_VALUE,
        "D has 6 rows",
    );
    refused(
        plain().layout(3, layout::LD, u64::MAX),
        INVALID_VALUE,
        "D has no elements, or a neg",
    );
    refused(
        plain().layout(0, layout::LD, 1 << 62),
        INVALID_VALUE,
        "larger than any memory",
    );
    refused(
        plain().layout(0, layout::ROWS, 0),
        INVALID_VALUE,
        "A has no elements",
    );
    let apart = "do not belong together";
    refused(plain().layout(0, layout::ROWS, 8), INVALID_VALUE, apart);
    refused(plain().layout(1, layout::COLS, 11), INVALID_VALUE, apart);
    refused(plain().layout(2, layout::COLS, 9), INVALID_VALUE, apart);
    refused(plain().layout(3, layout::ROWS, 5), INVALID_VALUE, apart);
    refused(plain().with(of::TRANSB, 1), INVALID_VALUE, apart);
    refused(plain().with(of::TRANSA, 3), INVALID_VALUE, "TRANSA is 3");
}

#[test]
fn what_is_not_emulated() {
    for (attribute, value, rule) in [
        (layout::ORDER, 1, "an order"),
        (layout::BATCH_COUNT, 2, "a batch"),
        (layout::BATCH_MODE, 1, "a batch of pointers"),
        (layout::PLANE_OFFSET, 64, "planes"),
        (layout::TYPE, 3, "type 3"),
    ] {
        refused(plain().layout(1, attribute, value), NOT_SUPPORTED, rule);
    }
    for (attribute, value, rule) in [
        (of::TRANSC, 1, "TRANSC is set"),
        (of::FILL_MODE, 0, "FILL_MODE is set"),
        (of::EPILOGUE_AUX_POINTER, 8, "EPILOGUE_AUX_POINTER is set"),
        (of::AMAX_D_POINTER, 8, "AMAX_D_POINTER is set"),
        (of::D_SCALE_MODE, 2, "D_SCALE_MODE is set"),
        (of::D_OUT_SCALE_POINTER, 8, "D_OUT_SCALE_POINTER is set"),
        (of::EPILOGUE, 32, "the epilogue is 32"),
        (of::EPILOGUE, 512, "the epilogue is 512"),
        (of::POINTER_MODE, 2, "the pointer mode is 2"),
        (of::COMPUTE_TYPE, 77, "the compute type is 77"),
        (of::SCALE_TYPE, 1, "the scale type is 1"),
    ] {
        refused(plain().with(attribute, value), NOT_SUPPORTED, rule);
    }
    assert!(plain().with(of::POINTER_MODE, 1).check().unwrap().on_device);
}

/// Compares with the table of types in the documentation, line by line. All other combinations must be refused.
#[test]
fn types_are_those_of_the_tables() {
    let all = [F64, F32, F16, BF16, E4M3, E5M2];
    let wide: &[[Element; 3]] = &[
        [BF16, BF16, BF16],
        [BF16, BF16, F32],
        [F16, F16, F16],
        [F16, F16, F32],
        [F32, F32, F32],
        [F64, F64, F64],
    ];
    let narrow: &[[Element; 4]] = &[
        [E4M3, E4M3, BF16, BF16],
        [E4M3, E4M3, BF16, E4M3],
        [E4M3, E4M3, F16, F16],
        [E4M3, E4M3, F16, E4M3],
        [E4M3, E4M3, F32, F32],
        [E4M3, E5M2, BF16, BF16],
        [E4M3, E5M2, BF16, E4M3],
        [E4M3, E5M2, BF16, E5M2],
        [E4M3, E5M2, F16, F16],
        [E4M3, E5M2, F16, E4M3],
        [E4M3, E5M2, F16, E5M2],
        [E4M3, E5M2, F32, F32],
        [E5M2, E4M3, BF16, BF16],
        [E5M2, E4M3, BF16, E4M3],
        [E5M2, E4M3, BF16, E5M2],
        [E5M2, E4M3, F16, F16],
        [E5M2, E4M3, F16, E4M3],
        [E5M2, E4M3, F16, E5M2],
        [E5M2, E4M3, F32, F32],
    ];
    let mut fitting = 0;
    for a in all {
        for b in all {
            for c in all {
                for d in all {
                    let mut asked = Asked::new([a, b, d], [32, 48, 64], [true, false], 0);
                    asked.layouts[2] = matrix(c, 32, 48, 32);
                    let fits =
                        (c == d && wide.contains(&[a, b, c])) || narrow.contains(&[a, b, c, d]);
                    let found = asked.check();
                    assert_eq!(found.is_ok(), fits, "{a:?} {b:?} {c:?} {d:?}: {found:?}");
                    let unfit = |refusal: Refusal| refusal.status == NOT_SUPPORTED;
                    assert!(found.err().is_none_or(unfit));
                    fitting += usize::from(fits);
                    for bias in all {
                        let asked = asked.clone().with(of::EPILOGUE, 4);
                        let asked = asked.with(of::BIAS_DATA_TYPE, number(bias));
                        let biased = if a.is_narrow() && c == F32 { BF16 } else { c };
                        let message = format!("{a:?} {b:?} {c:?} {d:?} and {bias:?}");
                        assert_eq!(asked.check().is_ok(), fits && bias == biased, "{message}");
                    }
                }
            }
        }
    }
    assert_eq!(fitting, 25);
    // The default type of the bias is the type of `D`, or of `C` if `D` is an 8-bit matrix.
    let mut narrow = Asked::narrow(E4M3).with(of::EPILOGUE, 4);
    narrow.layouts[2] = matrix(F16, 32, 48, 32);
    assert_eq!(narrow.check().unwrap().bias, Some(F16));
    let usual = Asked::narrow(F32).with(of::EPILOGUE, 4);
    refused(
        usual,
        NOT_SUPPORTED,
        "the bias is F32: with C in F32 it is BF16",
    );
}

#[test]
fn eight_bits_have_rules_of_their_own() {
    assert!(Asked::narrow(BF16).check().is_ok());
    for turned in [[false, false], [false, true], [true, true]] {
        let asked = Asked::new([E4M3, E4M3, BF16], [32, 48, 64], turned, 0);
        assert!(asked.clone().on(BLACKWELL).check().is_ok());
        refused(asked, NOT_SUPPORTED, "\"TN\"");
    }
    for sizes in [[24, 48, 64], [32, 40, 64], [32, 48, 72]] {
        let asked = Asked::new([E4M3, E4M3, F32], sizes, [true, false], 0);
        refused(asked, NOT_SUPPORTED, "m, n and k are");
    }
    for (which, leading) in [(0, 72), (1, 65), (2, 33), (3, 34)] {
        let asked = Asked::narrow(F32).layout(which, layout::LD, leading);
        refused(asked, NOT_SUPPORTED, "bytes apart");
    }
    let double = Asked::narrow(F32)
        .with(of::COMPUTE_TYPE, 70)
        .with(of::SCALE_TYPE, 1);
    refused(double, NOT_SUPPORTED, "have sums in 32F");
    refused(
        Asked::narrow(F32).with(of::D_SCALE_POINTER, 16),
        NOT_SUPPORTED,
        "D has a scale and is not of 8 bits",
    );
    assert!(Asked::narrow(F32).with(of::FAST_ACCUM, 1).check().is_ok());
}

#[test]
fn scales_go_together_and_with_the_chip() {
    let asked = |a, b| {
        let asked = Asked::narrow(F32).with(of::A_SCALE_MODE, a);
        asked.with(of::B_SCALE_MODE, b)
    };
    let together = |chip: Chip| -> Vec<[u64; 2]> {
        let pairs = (0..7).flat_map(|a| (0..7).map(move |b| [a, b]));
        let fits = |[a, b]: &[u64; 2]| asked(*a, *b).on(chip).check().is_ok();
        pairs.filter(fits).collect()
    };
    let chip = |capability, version| Chip {
        capability,
        version,
    };
    let one = [0, 0];
    assert_eq!(together(CHIP), [one, [3, 3], [4, 4], [4, 5], [5, 4]]);
    assert_eq!(together(chip((9, 0), 120_800)), [one]);
    assert_eq!(together(chip((8, 9), 120_901)), [one]);
    assert!(together(chip((8, 0), 120_901)).is_empty());
    assert!(together(chip((9, 0), 110_800)).is_empty());
    assert_eq!(together(BLACKWELL), [one, [2, 2]]);
    assert_eq!(together(chip((10, 0), 120_700)), [one]);
    refused(asked(5, 5), NOT_SUPPORTED, "do not go together");
    refused(
        asked(2, 2),
        NOT_SUPPORTED,
        "compute capability 10.0 and later",
    );
    refused(asked(1, 1), NOT_SUPPORTED, "the scale mode 1");
    // An 8-bit result allows only one scale mode.
    let mut narrow = asked(4, 4);
    narrow.layouts[2] = matrix(BF16, 32, 48, 32);
    narrow.layouts[3] = matrix(E4M3, 32, 48, 32);
    refused(narrow, NOT_SUPPORTED, "D is of 8 bits");
    for attribute in [17, 18, 19, 20, 31, 32] {
        refused(
            plain().with(attribute, 4),
            NOT_SUPPORTED,
            "only products of 8-bit factors",
        );
    }
}

#[test]
fn addresses_that_do_not_fit() {
    let memory = Memory::default();
    let broken = |call: Call, advised: [u32; 4], status: u32, rule: &str| {
        let preference = Attributes::new(preference::TABLE);
        let preference = (0..4).fold(preference, |preference, which| {
            preference.with(5 + which, advised[which as usize].into())
        });
        let algorithm = Algorithm::advise(&call.product, &preference).unwrap()[0];
        let refusal = call.check(&algorithm).expect_err(rule);
        assert!(
            refusal.rule.contains(rule),
            "{:?} instead of {rule}",
            refusal.rule
        );
        assert_eq!(refusal.status, status, "{rule}");
    };
    let usual = [256; 4];
    let good = call(plain().check().unwrap(), &memory);
    for (call, rule) in [
        (Call { a: 0, ..good }, "A is null"),
        (Call { b: 0, ..good }, "B is null"),
        (Call { d: 0, ..good }, "D is null"),
        (
            Call {
                c: 0,
                beta: Scalar::Value(1.0),
                ..good
            },
            "C is null",
        ),
        (
            Call {
                a: good.a + 128,
                ..good
            },
            "told that it is a multiple of 256",
        ),
        (Call { d: good.a, ..good }, "A and D overlap"),
        (
            Call {
                d: good.b,
                c: 0,
                ..good
            },
            "B and D overlap",
        ),
        (
            Call {
                workspace: 8,
                workspace_bytes: 1,
                ..good
            },
            "the workspace is at 0x8",
        ),
    ] {
        broken(call, usual, INVALID_VALUE, rule);
    }
    assert_eq!(good.check(&algorithm(&good.product)), Ok(()));
    // Adjacent matrices do not overlap: the last column ends 2 elements early.
    let a = good.product.a;
    assert_eq!(a.bytes(), (5 * 14 + 12) * 2);
    let [before, after] = [
        good.d - a.bytes() as u64,
        good.d + good.product.d.bytes() as u64,
    ];
    for (a, fits) in [
        (before, true),
        (before + 2, false),
        (after, true),
        (after - 2, false),
    ] {
        let beside = Call { a, ..good };
        assert_eq!(beside.check(&algorithm(&good.product)).is_ok(), fits);
    }
    let unread = Call { c: 0, ..good };
    assert_eq!(unread.check(&algorithm(&good.product)), Ok(()));
    for (offset, advised, fits) in [(16, [16; 4], true), (8, [16; 4], false), (8, [8; 4], true)] {
        let call = Call {
            a: good.a + offset,
            b: good.b + offset,
            c: good.c + offset,
            d: good.d + offset,
            ..good
        };
        if fits {
            let preference = (0..4).fold(Attributes::new(preference::TABLE), |all, which| {
                all.with(5 + which, u64::from(advised[which as usize]))
            });
            let algorithm = Algorithm::advise(&call.product, &preference).unwrap()[0];
            assert_eq!(call.check(&algorithm), Ok(()));
        } else {
            broken(
                call,
                advised,
                INVALID_VALUE,
                "told that it is a multiple of 16",
            )
        }
    }
    broken(
        Call {
            a: good.a + 1,
            ..good
        },
        [1; 4],
        NOT_SUPPORTED,
        "a multiple of 2 bytes",
    );
    // A part of the result overlaps the old result.
    let mut moved = Call {
        c: good.d + 4,
        beta: Scalar::Value(1.0),
        ..good
    };
    broken(moved, [4; 4], INVALID_VALUE, "C and D overlap");
    moved.c = good.d;
    moved.product.c.leading += 1;
    broken(moved, [4; 4], INVALID_VALUE, "with another layout");
    let biased = plain().with(of::EPILOGUE, 4).check().unwrap();
    let biased = Call {
        product: biased,
        ..good
    };
    broken(biased, usual, INVALID_VALUE, "the bias has no address");
    broken(
        Call { bias: 2, ..biased },
        usual,
        INVALID_VALUE,
        "a multiple of 4 bytes",
    );

    let narrow = call(Asked::narrow(F32).check().unwrap(), &memory);
    let off = Call {
        a: narrow.a + 8,
        ..narrow
    };
    broken(off, [1; 4], NOT_SUPPORTED, "a multiple of 16 bytes");
    for (modes, scales, rule) in [
        ([4, 5], [16, 0], "a scale has no address"),
        ([4, 4], [16, 24], "a multiple of 16 bytes"),
        ([3, 3], [2, 4], "a multiple of 4 bytes"),
        ([3, 3], [0, 4], "a scale has no address"),
        ([0, 0], [2, 0], "a multiple of 4 bytes"),
    ] {
        let asked = Asked::narrow(F32).with(of::A_SCALE_MODE, modes[0]);
        let asked = asked.with(of::B_SCALE_MODE, modes[1]);
        let call = Call {
            product: asked.check().unwrap(),
            scales: [scales[0], scales[1], 0, 0],
            ..narrow
        };
        broken(call, usual, INVALID_VALUE, rule);
    }
    let unscaled = Call {
        scales: [0; 4],
        ..narrow
    };
    assert_eq!(unscaled.check(&algorithm(&narrow.product)), Ok(()));
}

#[test]
fn algorithms_are_for_what_they_were_advised_for() {
    let product = plain().check().unwrap();
    let preference = Attributes::new(preference::TABLE);
    let workspaces = |advised: &[Algorithm]| -> Vec<_> {
        advised
            .iter()
            .map(|algorithm| algorithm.workspace)
            .collect()
    };
    let none = Algorithm::advise(&product, &preference).unwrap();
    assert_eq!(workspaces(&none), [0]);
    let allowed = preference
        .clone()
        .with(preference::MAX_WORKSPACE_BYTES, 32 << 20);
    let all = Algorithm::advise(&product, &allowed).unwrap();
    let some = all[0];
    assert_eq!(workspaces(&all), [65536, 0, 131_072]);
    for (spare, fitting) in [(0, &[65536, 0][..]), (1, &[0])] {
        let allowed = (some.workspace - spare) as u64;
        let allowed = preference
            .clone()
            .with(preference::MAX_WORKSPACE_BYTES, allowed);
        let found = Algorithm::advise(&product, &allowed).unwrap();
        assert_eq!(workspaces(&found), fitting);
    }
    assert_eq!(Algorithm::of(&some.opaque(), &product), Ok(some));
    let memory = Memory::default();
    let small = call(product, &memory);
    let rule = small.check(&some).unwrap_err().rule;
    assert!(rule.starts_with("the workspace has 0 bytes"), "{rule}");
    let other = plain().with(of::POINTER_MODE, 1).check().unwrap();
    let rule = Algorithm::of(&some.opaque(), &other).unwrap_err().rule;
    assert_eq!(rule, "the algorithm was advised for another product");
    let rule = Algorithm::of(&[0; 8], &product).unwrap_err().rule;
    assert_eq!(rule, "the algorithm is not one that this library advised");
    let odd = preference.with(5, 24);
    assert!(Algorithm::advise(&product, &odd).is_err());
}

//! Tests of the requests to cuBLASLt. These tests do not need the library.

use insta::assert_snapshot;

use super::*;
use crate::fp8::product::problem::{Fp8Factor, Fp8Problem, describe};
use crate::gemm::request::{Chip, Element, ScaleMode, Scaled};
use crate::gemm::{Epilogue, Operand};

const fn chip(capability: (i32, i32), version: usize) -> Chip {
    Chip {
        capability,
        version,
    }
}

const HOPPER: Chip = chip((9, 0), 120_901);
const BLACKWELL: Chip = chip((10, 0), 130_000);

fn problem(a: ScaleMode, b: ScaleMode) -> Fp8Problem {
    Fp8Problem {
        rows: 32,
        columns: 48,
        depth: 64,
        a: Fp8Factor {
            format: Format::E5M2,
            scales: a,
        },
        b: Fp8Factor {
            format: Format::E4M3,
            scales: b,
        },
        result: DType::BF16,
        epilogue: Epilogue::Nothing,
        accumulation: Accumulation::Exact,
    }
}

const ONE: ScaleMode = ScaleMode::Tensor;

#[test]
fn factors_are_k_major_and_change_places() {
    let request = problem(ONE, ONE).request();
    let layout = request.layout;
    // D is 48 x 32, op(A) = b is 48 x 64, and op(B) = a^T is 64 x 32. This is layout "TN": both operands have 64 rows
    // in memory.
    assert_eq!(
        [layout.m, layout.n, layout.k, layout.leading],
        [48, 32, 64, 48]
    );
    let operand = |columns, transpose| Operand {
        rows: 64,
        columns,
        leading: 64,
        transpose,
    };
    assert_eq!(
        [layout.a, layout.b],
        [operand(48, true), operand(32, false)]
    );
    let formats = [Format::E4M3, Format::E5M2].map(Element::Fp8);
    assert_eq!(request.factors, formats);
    assert_eq!(
        (request.result, request.epilogue),
        (DType::BF16, Epilogue::Nothing)
    );
}

#[test]
fn matrices_have_their_kind_of_scales_and_rows_padded_with_zeros() {
    let device = Device::flex();
    let modes = [ONE, ScaleMode::Rows, ScaleMode::Squares, ScaleMode::Mx];
    for (kind, mode) in ScalesKind::ALL.into_iter().zip(modes) {
        let draw = TestValues {
            format: Format::E5M2,
            kind,
            exact: true,
            seed: 1,
        };
        let matrix = draw.matrix(16, 130, &device).matrix;
        let problem = Fp8Problem::new(
            &matrix,
            &draw.matrix(32, 130, &device).matrix,
            DType::F32,
            Epilogue::Flat { add: true },
            Accumulation::Fast,
        );
        assert_eq!(problem.a.scales, mode);
        assert_eq!(problem.b.format, Format::E5M2);
        assert_eq!(
            [problem.rows, problem.columns, problem.depth],
            [16, 32, 144]
        );
        assert_eq!(problem.epilogue, Epilogue::Flat { add: true });
    }
}

#[test]
fn sums_are_fast_where_asked_and_with_one_scale_alone() {
    for (accumulation, fast) in [(Accumulation::Exact, false), (Accumulation::Fast, true)] {
        let scaled = |a, b| {
            let problem = Fp8Problem {
                accumulation,
                ..problem(a, b)
            };
            problem.request().scaled
        };
        let modes = |modes, fast| Some(Scaled { modes, fast });
        assert_eq!(scaled(ONE, ONE), modes([ONE; 2], fast));
        let (rows, squares, mx) = (ScaleMode::Rows, ScaleMode::Squares, ScaleMode::Mx);
        // The scales of b come first, because b is the first operand.
        assert_eq!(scaled(rows, squares), modes([squares, rows], false));
        assert_eq!(scaled(rows, rows), modes([rows, rows], false));
        assert_eq!(scaled(mx, mx), modes([mx, mx], false));
    }
}

#[test]
fn scale_modes_have_the_numbers_of_the_library() {
    use ScaleMode::{Mx, Rows, Squares};
    let numbers = [ONE, Mx, Rows, Squares].map(|mode| mode as i32);
    assert_eq!(numbers, [0, 2, 4, 5]);
}

#[test]
fn gpus_and_libraries_support_what_their_documentation_lists() {
    use ScaleMode::{Mx, Rows, Squares};
    let reason = |a, b, chip| problem(a, b).accept(chip).err().unwrap_or_default();
    for (a, b) in [(ONE, ONE), (Rows, Rows), (Rows, Squares), (Squares, Rows)] {
        assert_eq!(reason(a, b, HOPPER), "");
    }
    assert_eq!(reason(ONE, ONE, chip((8, 9), 120_000)), "");
    assert_eq!(reason(ONE, ONE, BLACKWELL), "");
    assert_eq!(reason(Mx, Mx, BLACKWELL), "");
    assert_snapshot!(
        reason(ONE, ONE, chip((8, 0), 120_901)),
        @"cuBLASLt 12.9.1 on compute capability 8.0: compute capability 8.9 and later support one scale"
    );
    assert_snapshot!(
        reason(Rows, Squares, BLACKWELL),
        @"cuBLASLt 13.0.0 on compute capability 10.0: compute capability 9.0 alone supports scales of \
          blocks of 128"
    );
    assert_snapshot!(
        reason(Rows, Rows, chip((9, 0), 120_402)),
        @"cuBLASLt 12.4.2 on compute capability 9.0: cuBLASLt 12.9 and later support scales of blocks \
          of 128"
    );
    assert_snapshot!(
        reason(Mx, Mx, HOPPER),
        @"cuBLASLt 12.9.1 on compute capability 9.0: compute capability 10.0 and later support MXFP8"
    );
    assert_snapshot!(
        reason(Mx, Mx, chip((10, 0), 120_700)),
        @"cuBLASLt 12.7.0 on compute capability 10.0: cuBLASLt 12.8 and later support MXFP8"
    );
    assert_snapshot!(
        reason(Squares, Squares, HOPPER),
        @"both factors have scales of 128 x 128: expected 1 x 128 for one of them"
    );
    assert_snapshot!(reason(ONE, Rows, HOPPER), @"a has scales of Tensor, b has scales of Rows: expected scales of the \
        same kind");
}

#[test]
fn sizes_and_formats_that_the_library_lacks() {
    let reason = |problem: Fp8Problem| problem.accept(HOPPER).err().unwrap_or_default();
    let good = problem(ONE, ONE);
    assert_snapshot!(
        reason(Fp8Problem { rows: 40, ..good }),
        @"the factors have 40 and 48 rows: expected multiples of 16"
    );
    assert_snapshot!(
        reason(Fp8Problem { columns: 8, ..good }),
        @"the factors have 32 and 8 rows: expected multiples of 16"
    );
    for empty in [
        Fp8Problem { rows: 0, ..good },
        Fp8Problem { columns: 0, ..good },
        Fp8Problem { depth: 0, ..good },
    ] {
        assert_eq!(reason(empty), "the matrices are empty");
    }
    let factor = good.a;
    assert_snapshot!(
        reason(Fp8Problem { b: factor, ..good }),
        @"both factors are E5M2: expected at least one in E4M3"
    );
}

#[test]
fn chips_are_described_in_a_line() {
    assert_snapshot!(
        describe(HOPPER),
        @"cuBLASLt 12.9.1 on compute capability 9.0 for one scale, blocks of 128; decoded to f32 \
          and multiplied for MXFP8"
    );
    assert_snapshot!(
        describe(BLACKWELL),
        @"cuBLASLt 13.0.0 on compute capability 10.0 for one scale, MXFP8; decoded to f32 and \
          multiplied for blocks of 128"
    );
    assert_snapshot!(
        describe(chip((8, 0), 120_901)),
        @"decoded to f32 and multiplied: cuBLASLt 12.9.1 on compute capability 8.0 does not support FP8 matrix products"
    );
}

//! Tests of matrix multiplications with the BLAS libraries that are installed on this machine.

use burn_megatron_test_support::skipped;

use super::*;

/// Returns the BLAS libraries that are installed on this machine.
fn libraries() -> Vec<Blas> {
    let mut all = vec![];
    for kind in CpuGemm::ALL {
        match kind.open() {
            Ok(blas) => all.extend(blas),
            Err(error) => println!("without {kind}: {error}"),
        }
    }
    if all.is_empty() {
        skipped("no BLAS library can be opened");
    }
    all
}

/// Sizes that are split over several threads, and an empty size.
const LARGE: [[usize; 3]; 3] = [[300, 200, 170], [170, 200, 301], [0, 3, 4]];

#[test]
fn libraries_compute_what_the_crate_does() {
    let flex = Device::flex();
    let in_turn = SIZES.iter().chain(&LARGE);
    for (blas, [rows, inputs, outputs]) in libraries()
        .into_iter()
        .flat_map(|blas| in_turn.clone().map(move |sizes| (blas, *sizes)))
    {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let what = format!("{blas}, {dtype:?} [{rows}, {inputs}, {outputs}]");
            let x = matrix([rows, inputs], 0.1, &flex, dtype);
            let weight = matrix([inputs, outputs], 0.5, &flex, dtype);
            let bias = Some(row(outputs, 0.8, &flex, dtype));
            let expected = linear(x.clone(), weight.clone(), bias.clone());
            let forms = [
                (x.clone(), weight.clone()),
                (turned(x.clone()), framed(weight.clone())),
                (framed(x.clone()), turned(weight)),
            ];
            let before = blas.calls();
            for (x, weight) in forms {
                let y = linear_by(Some(blas), x.clone(), weight.clone(), bias.clone());
                let again = linear_by(Some(blas), x, weight, bias.clone());
                assert_eq!(doubles(again), doubles(y.clone()), "{what}");
                assert_near(&what, y, expected.clone(), 2.0 * tolerance(dtype));
            }
            // An empty result does not call the library.
            assert_eq!(blas.calls() >= before + 6, rows > 0, "{what}");
            let dy = matrix([rows, outputs], 0.3, &flex, dtype);
            for add in [false, true] {
                let sum = |blas| {
                    let flat = row(inputs * outputs + 5, 0.4, &flex, wide(dtype));
                    let (x, dy) = (x.clone(), dy.clone());
                    let sum = accumulate_weight_gradient_at_by(blas, x, dy, flat, 3, add);
                    sum.unsqueeze()
                };
                let tolerance = 2.0 * tolerance(wide(dtype));
                assert_near(&what, sum(Some(blas)), sum(None), tolerance);
            }
        }
    }
}

#[test]
fn a_name_that_is_no_library_is_refused() {
    for kind in CpuGemm::ALL {
        assert_eq!(kind.name().parse(), Ok(kind));
    }
    let error = "atlas".parse::<CpuGemm>().unwrap_err();
    insta::assert_snapshot!(error, @"invalid gemm \"atlas\": expected gemm, mkl, openblas or blis");
}

use std::ops::Range;

use burn::tensor::{DType, Device, Tensor, TensorData};
use proptest::prelude::*;

use super::*;
use crate::gradient::Place;
use crate::testing::{
    Input, assert_close, assert_gradients, compare_within, devices, evaluate, tolerance,
};

mod case;
mod compare;
mod contract;
mod merge;
#[cfg(feature = "cubecl")]
mod mma;
mod refused;

use case::*;

fn compare_widths(widths: &[usize]) {
    for width in widths {
        Case::new(1, 35, 35, heads(2, 1, *width)).compare();
    }
}

#[test]
fn some_widths_are_those_of_the_composition() {
    compare_widths(&[16, 33, 64]);
}

#[test]
#[ignore = "slow: each width compiles its own kernels; run by the nightly workflow"]
fn every_width_is_that_of_the_composition() {
    compare_widths(&[1, 48, 96, 128, 192, 256]);
}

#[test]
fn every_length_is_that_of_the_composition() {
    for seq in [1, 7, 16, 63, 64, 65, 130] {
        // With a sink, a query with one visible key has a gradient.
        let case = Case::new(1, seq, seq, heads(1, 1, 16));
        Case { sink: true, ..case }.compare();
    }
}

#[test]
fn groups_of_heads_share_their_keys() {
    for (share, width) in [(1, 12), (2, 16), (3, 16)] {
        Case::new(2, 18, 18, heads(2 * share, 2, width)).compare();
    }
}

#[test]
fn queries_are_aligned_to_the_end_of_the_keys() {
    for (queries, keys) in [(5, 21), (21, 5), (1, 70)] {
        for causal in [false, true] {
            let case = Case::new(2, queries, keys, heads(2, 1, 16));
            Case { causal, ..case }.compare();
        }
    }
}

#[test]
fn windows_are_those_of_the_composition() {
    for window in [(0, 0), (3, 2), (usize::MAX, 1)] {
        for (causal, keys) in [(false, 40), (true, 50)] {
            let case = Case::new(1, 40, keys, heads(2, 2, 16));
            let window = Some(window);
            Case {
                causal,
                window,
                sink: true,
                ..case
            }
            .compare();
        }
    }
}

#[test]
fn documents_do_not_see_each_other() {
    for ends in [vec![40], vec![0, 1, 2, 2, 20, 40, 40], (1..=40).collect()] {
        for causal in [false, true] {
            let case = Case::new(2, 40, 40, heads(2, 1, 16));
            let (ends, window) = (Some(ends.clone()), causal.then_some((6, 0)));
            Case {
                causal,
                ends,
                window,
                sink: true,
                ..case
            }
            .compare();
        }
    }
}

#[test]
fn a_sink_takes_its_part() {
    for (queries, keys) in [(20, 20), (20, 8)] {
        let case = Case::new(2, queries, keys, heads(4, 2, 16));
        Case { sink: true, ..case }.compare();
    }
}

#[test]
fn gradients_are_those_of_differences() {
    let case = Case {
        window: Some((3, 1)),
        sink: true,
        causal: false,
        ..Case::new(1, 5, 6, heads(2, 1, 3))
    };
    assert_gradients("attention", &case.inputs(), |x| case.ours(x));
    let heads = heads(2, 1, 3);
    let inputs = [
        Input::wave([1, 5, heads.features()], 0.2),
        Input::wave([2], 0.5),
    ];
    assert_gradients("packed attention", &inputs, |x| {
        let qkv = x[0].clone().reshape([1, 5, heads.features()]);
        let options = AttentionOptions {
            causal: true,
            ..Default::default()
        };
        flash_attention_packed(qkv, heads, Some(x[1].clone()), &options).flatten(0, 2)
    });
}

#[test]
fn a_joint_projection_is_read_in_place() {
    for shape in [heads(4, 2, 16), heads(3, 1, 33)] {
        let inputs = [
            Input::wave([2, 19, shape.features()], 0.3),
            Input::wave([shape.heads], 0.1),
        ];
        let split = |x: &[Tensor<1>]| {
            let qkv = x[0].clone().reshape([2, 19, shape.features()]);
            let documents = KeyRanges::of_documents(&[4, 19], &qkv.device()).unwrap();
            let options = AttentionOptions {
                causal: true,
                ranges: Some(documents),
                scale: Some(0.3),
                ..Default::default()
            };
            (qkv, Some(x[1].clone()), options)
        };
        compare_engines(
            "packed",
            (shape.width, shape.width),
            &inputs,
            |x, engine| {
                let (qkv, sink, options) = split(x);
                flash_attention_packed_with(engine, qkv, shape, sink, &options).flatten(0, 2)
            },
            |x| {
                let (qkv, sink, options) = split(x);
                composed::flash_attention_packed(qkv, shape, sink, &options).flatten(0, 2)
            },
        );
    }
}

#[test]
fn views_are_taken() {
    let inputs = [
        Input::wave([2, 2, 24, 27], 0.3).scaled(0.5, 0.0),
        Input::wave([2, 12, 2, 34], 0.5).scaled(0.5, 0.0),
    ];
    let options = AttentionOptions::default();
    let split = |x: &[Tensor<1>]| {
        // Transposed queries, slices of rows and of features, and a transposed last dimension.
        let q = x[0].clone().reshape([2, 2, 24, 27]).swap_dims(1, 2);
        let q = q.narrow(1, 3, 12).narrow(3, 4, 16);
        let k = x[1].clone().reshape([2, 12, 2, 34]).narrow(3, 1, 16);
        let v = x[1].clone().reshape([2, 12, 34, 2]);
        (q, k, v.swap_dims(2, 3).narrow(3, 0, 16))
    };
    compare_engines(
        "views",
        (16, 16),
        &inputs,
        |x, engine| {
            let (q, k, v) = split(x);
            flash_attention_with(engine, q, k, v, None, &options).flatten(0, 3)
        },
        |x| {
            let (q, k, v) = split(x);
            composed::flash_attention(q, k, v, None, &options).flatten(0, 3)
        },
    );
}

#[test]
fn nothing_to_attend_gives_nothing() {
    for (device, _) in devices() {
        let zeros = |rows: usize, heads: usize| {
            Tensor::<4>::zeros([2, rows, heads, 4], (&device, DType::F32))
        };
        let options = AttentionOptions::default();
        let run = |queries: usize, keys: usize, sink: Option<Tensor<1>>| {
            let (q, kv) = (zeros(queries, 2) + 1.0, zeros(keys, 1) + 1.0);
            attention_forward(&Portable, q, kv.clone(), kv, sink, &options)
        };
        let (out, lse) = run(0, 5, None);
        assert_eq!((out.dims(), lse.dims()), ([2, 0, 2, 4], [2, 2, 0]));
        let (out, lse) = run(3, 0, None);
        assert_eq!(out.into_data().try_into_vec::<f32>().unwrap(), [0.0; 48]);
        assert_eq!(
            lse.into_data().try_into_vec::<f32>().unwrap(),
            [f32::NEG_INFINITY; 12]
        );
        let sink = Tensor::from_data([1.5f32, -2.0], (&device, DType::F32));
        let lse = run(1, 0, Some(sink)).1;
        assert_eq!(
            lse.into_data().try_into_vec::<f32>().unwrap(),
            [1.5, -2.0, 1.5, -2.0]
        );
    }
}

#[test]
fn a_query_that_sees_nothing_gives_nothing() {
    for (device, _) in devices() {
        let values = |rows: usize| Tensor::<4>::ones([1, rows, 1, 4], (&device, DType::F32));
        let options = AttentionOptions {
            causal: true,
            ..Default::default()
        };
        // With five queries and three keys, the first two queries are before the first key.
        let (out, lse) =
            attention_forward(&Portable, values(5), values(3), values(3), None, &options);
        let out = out.into_data().try_into_vec::<f32>().unwrap();
        assert_eq!(out[..8], [0.0; 8]);
        assert!(out[8..].iter().all(|x| (x - 1.0).abs() < 1e-6), "{out:?}");
        let lse = lse.into_data().try_into_vec::<f32>().unwrap();
        assert_eq!(lse[..2], [f32::NEG_INFINITY; 2]);
        assert!(lse[2..].iter().all(|x| x.is_finite()), "{lse:?}");
    }
}

#[test]
fn the_log_sum_exp_is_that_of_f64() {
    let case = Case {
        sink: true,
        ..Case::new(2, 20, 20, heads(2, 1, 12))
    };
    let inputs = case.inputs();
    let lse = |device: &Device, dtype: DType| {
        let [q, k, v] = [0, 1, 2].map(|i| plain::<4>(&inputs[i], device, dtype));
        let sink = Some(plain::<1>(&inputs[3], device, dtype));
        attention_forward(&Portable, q, k, v, sink, &case.options(device)).1
    };
    let exact = doubles(lse(&Device::flex(), DType::F64));
    // One row is computed by hand. All keys are visible to the last query of the first head.
    let (q, k) = (&inputs[0].values, &inputs[1].values);
    let score = |j: usize| {
        let products = (0..12).map(|w| q[(19 * 2) * 12 + w] * k[j * 12 + w]);
        products.sum::<f64>() / 12f64.sqrt()
    };
    let sum = (0..20).map(|j| score(j).exp()).sum::<f64>() + inputs[3].values[0].exp();
    assert!((exact[19] - sum.ln()).abs() < 1e-12);
    for (device, _) in devices() {
        let ours = lse(&device, DType::F32);
        assert_eq!(ours.dtype(), DType::F32);
        assert_near("lse", doubles(ours), exact.clone(), 2e-6);
    }
}

#[test]
fn large_scores_do_not_overflow() {
    // With scores of several thousand, the softmax selects the largest score.
    let inputs = [Input::wave([1, 9, 1, 8], 0.1).scaled(60.0, 0.0)];
    for (device, _) in devices() {
        let x = plain::<4>(&inputs[0], &device, DType::F32);
        let options = AttentionOptions::default();
        let (out, lse) = attention_forward(&Portable, x.clone(), x.clone(), x, None, &options);
        assert!(
            doubles(out)
                .iter()
                .chain(&doubles(lse))
                .all(|x| x.is_finite())
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn any_problem_is_that_of_the_composition(
        batch in 1usize..3, queries in 1usize..40, keys in 1usize..40, share in 1usize..4,
        groups in 1usize..3, width in 1usize..40, causal: bool, sink: bool,
        window in proptest::option::of((0usize..50, 0usize..50)),
    ) {
        let case = Case {
            causal,
            window,
            sink,
            ..Case::new(batch, queries, keys, heads(share * groups, groups, width))
        };
        case.agree(devices().into_iter().take(1));
    }
}

#[test]
fn everything_at_once_is_right_on_every_device() {
    let case = Case {
        window: Some((9, 0)),
        ends: Some(vec![5, 5, 6, 37]),
        sink: true,
        ..Case::new(2, 37, 37, heads(6, 2, 20))
    };
    case.agree(devices());
    for (causal, window) in [(true, None), (false, None), (false, Some((9, 4)))] {
        let case = Case {
            causal,
            window,
            ends: Some(vec![0, 5, 5, 6, 50, 71]),
            sink: true,
            ..Case::new(2, 71, 71, heads(4, 2, 48))
        };
        case.compare();
    }
}

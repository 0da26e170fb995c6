//! Tests the guarantees for callers that merge partial results: key ranges, log-sum-exps, and gradients in flat
//! buffers.

use super::*;

/// Returns the positions of one of two ranks. The sequence is split into four chunks. Rank 0 has the first and the last
/// chunk, and rank 1 has the two middle chunks.
fn zigzag(rank: usize, chunk: usize) -> Vec<usize> {
    let chunks = [rank, 3 - rank];
    chunks
        .iter()
        .flat_map(|i| i * chunk..(i + 1) * chunk)
        .collect()
}

/// Returns the range of visible keys of each query with a causal mask and a window of `left` positions before the
/// query.
fn seen(queries: &[usize], keys: &[usize], left: usize) -> Vec<Range<usize>> {
    let before = |position: usize| keys.partition_point(|key| *key < position);
    let ranges = queries
        .iter()
        .map(|at| before(at.saturating_sub(left))..before(at + 1));
    ranges.collect()
}

fn tested() -> impl Iterator<Item = Tested> {
    portable().chain(matrix_engines())
}

#[test]
fn ranges_are_those_of_the_composition() {
    let (low, high) = (zigzag(0, 20), zigzag(1, 20));
    for (queries, keys, left) in [
        (&low, &low, 100),
        // The first half of the queries has no visible key. All keys are visible to the second half.
        (&low, &high, 100),
        // The first half of the keys is visible to all queries. The second half is visible to no query.
        (&high, &low, 100),
        (&high, &low, 13),
        (&low, &high, 13),
    ] {
        let ranges = Some(seen(queries, keys, left));
        let case = Case::new(2, queries.len(), keys.len(), heads(4, 2, 16));
        Case {
            causal: false,
            ranges,
            ..case
        }
        .compare();
    }
    // These ranges have rows without keys between other rows, fewer queries than keys, and a mask in addition to the
    // ranges.
    let ranges = [
        0..3,
        0..3,
        3..3,
        4..9,
        9..9,
        9..50,
        20..70,
        70..70,
        69 + 1..70,
    ];
    for causal in [false, true] {
        let case = Case::new(1, ranges.len(), 70, heads(2, 1, 16));
        let ranges = Some(ranges.to_vec());
        Case {
            causal,
            ranges,
            ..case
        }
        .compare();
    }
}

#[test]
fn values_may_be_narrower_or_wider_than_keys() {
    for (width, value_width) in [(24, 5), (5, 24), (32, 16), (192, 128)] {
        let case = Case {
            value_width,
            ends: Some(vec![9, 40]),
            sink: true,
            ..Case::new(2, 40, 40, heads(4, 2, width))
        };
        case.compare();
    }
}

/// Two steps of ring attention on rank 0 of two ranks, with four tokens of two features. The expected numbers were
/// computed by hand in f64.
#[test]
fn partial_results_are_those_of_a_ring() {
    let device = Device::flex();
    let rows = |values: &[f64]| {
        let shape = [1, values.len() / 2, 1, 2];
        Tensor::<4>::from_data(
            TensorData::new(values.to_vec(), shape),
            (&device, DType::F64),
        )
    };
    let q = rows(&[1.0, 0.0, -1.0, 1.0]);
    let own = [rows(&[1.0, 1.0, 0.5, -0.5]), rows(&[1.0, 0.0, -1.0, 3.0])];
    let other = [rows(&[0.0, 1.0, 1.0, 0.0]), rows(&[0.0, 1.0, 2.0, 1.0])];
    let step = |[k, v]: [Tensor<4>; 2], ranges: [Range<usize>; 2]| {
        let ranges = Some(KeyRanges::new(ranges.to_vec(), 2, &device).unwrap());
        let options = AttentionOptions {
            ranges,
            ..Default::default()
        };
        let (out, lse) = attention_forward(&Portable, q.clone(), k, v, None, &options);
        (doubles(out), doubles(lse))
    };
    let (out, lse) = step(own, [0..1, 0..2]);
    assert_near(
        "out",
        out[2..].to_vec(),
        vec![0.339523099, 0.990715352],
        1e-8,
    );
    assert_near("lse", lse, vec![0.5f64.sqrt(), 0.400833527], 1e-8);
    let (out, lse) = step(other, [0..0, 0..2]);
    assert_eq!((out[0], out[1], lse[0]), (0.0, 0.0, f64::NEG_INFINITY));
    assert_near("out", out[2..].to_vec(), vec![0.391140635, 1.0], 1e-8);
    assert_near("lse", lse[1..].to_vec(), vec![0.924728503], 1e-8);
}

/// The queries of one of two ranks attend to the keys of both ranks, one rank after the other. The gradients of keys
/// and values are added to one flat buffer.
#[test]
fn blocks_of_keys_make_the_whole() {
    const CHUNK: usize = 18;
    const WINDOW: usize = 50;
    let queries = zigzag(1, CHUNK);
    let all: Vec<_> = (0..4 * CHUNK).collect();
    let whole = Case {
        causal: false,
        ranges: Some(seen(&queries, &all, WINDOW)),
        value_width: 16,
        sink: true,
        ..Case::new(2, queries.len(), all.len(), heads(4, 2, 32))
    };
    let inputs = whole.inputs();
    for tested in tested() {
        let device = &tested.device;
        for dtype in tested.types {
            let expected = evaluate(&inputs, &Device::flex(), DType::F64, dtype, &|x| {
                whole.reference(x)
            });
            let [q, k, v] = [0, 1, 2].map(|i| plain::<4>(&inputs[i], device, dtype));
            let sink = plain::<1>(&inputs[3], device, dtype);
            let count = expected.output.len();
            let dout = plain::<1>(&Input::wave([count], 0.37), device, dtype);
            let dout = dout.reshape([2, queries.len(), 4, 16]);
            // Only one of the two calls has the sink.
            let blocks = [1, 0].map(|rank| {
                let positions = zigzag(rank, CHUNK);
                let cut = |x: &Tensor<4>| {
                    let chunks = [rank, 3 - rank].map(|i| x.clone().narrow(1, i * CHUNK, CHUNK));
                    Tensor::cat(chunks.to_vec(), 1)
                };
                let ranges = seen(&queries, &positions, WINDOW);
                let options = AttentionOptions {
                    ranges: Some(KeyRanges::new(ranges, positions.len(), device).unwrap()),
                    ..Default::default()
                };
                let sink = (rank == 0).then(|| sink.clone());
                (cut(&k), cut(&v), sink, options, positions)
            });
            let parts = blocks.clone().map(|(k, v, sink, options, _)| {
                attention_forward(&*tested.engine, q.clone(), k, v, sink, &options)
            });
            let lse = (parts[0].1.clone().exp() + parts[1].1.clone().exp()).log();
            let [first, second] = parts.map(|(out, part)| {
                let share = (part - lse.clone()).exp().swap_dims(1, 2);
                out.cast(lse.dtype()) * share.unsqueeze_dim::<4>(3)
            });
            let out = (first + second).cast(dtype);
            let [nk, nv] = [32, 16].map(|width| 2 * 2 * CHUNK * 2 * width);
            let mut flat = Tensor::<1>::zeros([2 * (nk + nv)], (device, lse.dtype()));
            let (mut dq, mut dsink) = (Tensor::zeros(q.dims(), (device, lse.dtype())), None);
            let mut found = [vec![0.0; 2 * nk], vec![0.0; 2 * nv]];
            for (i, (k, v, sink, options, positions)) in blocks.into_iter().enumerate() {
                let offset = i * (nk + nv);
                let places = [offset, offset + nk].map(|offset| Place { offset, add: true });
                let (places, result) = (places.to_vec(), (out.clone(), lse.clone()));
                let sums = Some(FlatGradients { flat, places });
                let (q, dout, engine) = (q.clone(), dout.clone(), &*tested.engine);
                let part = attention_backward(engine, q, k, v, sink, result, dout, &options, sums);
                let ProjectionGradients::Flat {
                    dq: of_block,
                    flat: sums,
                } = part.projections
                else {
                    panic!("expected the flat buffer")
                };
                dq = dq + of_block.cast(lse.dtype());
                dsink = dsink.or(part.dsink);
                let values = doubles(sums.clone());
                // Moves the rows back to their positions.
                for (part, width, offset) in [(0, 32, offset), (1, 16, offset + nk)] {
                    let row = 2 * width;
                    for (at, values) in values[offset..][..2 * 2 * CHUNK * row]
                        .chunks(row)
                        .enumerate()
                    {
                        let (batch, key) = (at / positions.len(), at % positions.len());
                        let to = (batch * all.len() + positions[key]) * row;
                        found[part][to..][..row].copy_from_slice(values);
                    }
                }
                flat = sums;
            }
            let [dk, dv] = found;
            let actual = crate::testing::Evaluation {
                output: doubles(out),
                gradients: vec![doubles(dq), dk, dv, doubles(dsink.unwrap())],
            };
            let what = format!(
                "blocks by {} in {dtype:?} on {device:?}",
                tested.engine.name()
            );
            assert_close(&what, &expected, &actual, CANCELLED * tolerance(dtype));
        }
    }
}

#[test]
fn gradients_of_keys_are_written_or_added_as_they_were_summed() {
    let case = Case {
        value_width: 16,
        ..Case::new(1, 37, 40, heads(4, 2, 32))
    };
    let inputs = case.inputs();
    for tested in tested() {
        let device = &tested.device;
        for dtype in tested.types {
            let [q, k, v] = [0, 1, 2].map(|i| plain::<4>(&inputs[i], device, dtype));
            let dout = plain(&Input::wave([1, 37, 4, 16], 0.6), device, dtype);
            let (engine, options) = (&*tested.engine, case.options(device));
            let result = attention_forward(engine, q.clone(), k.clone(), v.clone(), None, &options);
            let backward = |sums| {
                let (q, k, v) = (q.clone(), k.clone(), v.clone());
                let (result, dout) = (result.clone(), dout.clone());
                attention_backward(engine, q, k, v, None, result, dout, &options, sums).projections
            };
            let wide = result.1.dtype();
            let (dk, dv) = (40 * 2 * 32, 40 * 2 * 16);
            let (at_dk, at_dv, end) = (4, dk + 8, dk + dv + 12);
            let to_flat = |add: bool| {
                let places = [at_dk, at_dv].map(|offset| Place { offset, add }).to_vec();
                let flat = Tensor::ones([end], (device, wide));
                match backward(Some(FlatGradients { flat, places })) {
                    ProjectionGradients::Flat { flat, .. } => flat,
                    other => panic!("expected the flat buffer, not {other:?}"),
                }
            };
            let (written, added) = (to_flat(false), to_flat(true));
            let ProjectionGradients::Separate {
                dk: own_dk,
                dv: own_dv,
                ..
            } = backward(None)
            else {
                panic!("expected gradients on their own")
            };
            let what = format!("{engine:?} in {dtype:?}");
            let rounded = doubles(written.clone().cast(dtype));
            assert_eq!(rounded[at_dk..][..dk], doubles(own_dk), "{what}: keys");
            assert_eq!(rounded[at_dv..][..dv], doubles(own_dv), "{what}: values");
            let mut expected = doubles(written.clone() + 1.0);
            for gap in [0..at_dk, at_dk + dk..at_dv, at_dv + dv..end] {
                assert!(
                    doubles(written.clone())[gap.clone()]
                        .iter()
                        .all(|x| *x == 1.0),
                    "{what}"
                );
                expected[gap].fill(1.0);
            }
            // The device may compute the multiplication by the scale and the addition with a single rounding.
            assert_near(
                &format!("{what}: added"),
                doubles(added),
                expected,
                2f64.powi(-23),
            );
        }
    }
}

#[test]
fn a_call_without_visible_keys_gives_what_belongs_to_its_sink() {
    for tested in tested() {
        let (device, dtype) = (&tested.device, tested.types[0]);
        let input =
            |shape: [usize; 4], phase| plain::<4>(&Input::wave(shape, phase), device, dtype);
        let (q, k, v) = (
            input([2, 9, 2, 16], 0.1),
            input([2, 5, 1, 16], 0.5),
            input([2, 5, 1, 16], 0.9),
        );
        let dout = input([2, 9, 2, 16], 0.6);
        let sink = plain::<1>(&Input::wave([2], 0.4), device, dtype);
        let engine = &*tested.engine;
        let forward = |sink, options| {
            attention_forward(engine, q.clone(), k.clone(), v.clone(), sink, options)
        };
        let backward = |sink, result, options, sums| {
            let (q, k, v, dout) = (q.clone(), k.clone(), v.clone(), dout.clone());
            attention_backward(engine, q, k, v, sink, result, dout, options, sums)
        };
        let all = AttentionOptions::default();
        let none = AttentionOptions {
            ranges: Some(KeyRanges::new(vec![3..3; 9], 5, device).unwrap()),
            ..Default::default()
        };
        let (out, lse) = forward(None, &none);
        assert!(doubles(out).iter().all(|x| *x == 0.0));
        assert!(doubles(lse.clone()).iter().all(|x| *x == f64::NEG_INFINITY));
        let (out, of_sink) = forward(Some(sink.clone()), &none);
        assert!(doubles(out).iter().all(|x| *x == 0.0));
        let expected = sink
            .clone()
            .cast(lse.dtype())
            .reshape([1, 2, 1])
            .expand([2, 2, 9]);
        assert_eq!(doubles(of_sink), doubles(expected));
        // The result of the forward pass over all keys.
        let result = forward(Some(sink.clone()), &all);
        let expected = backward(Some(sink.clone()), result.clone(), &all, None).dsink;
        let flat = Tensor::ones([320], (device, lse.dtype()));
        let places = [(0, true), (160, false)].map(|(offset, add)| Place { offset, add });
        let sums = Some(FlatGradients {
            flat,
            places: places.to_vec(),
        });
        let gradients = backward(Some(sink), result, &none, sums);
        let [found, expected] = [gradients.dsink, expected].map(|dsink| doubles(dsink.unwrap()));
        assert_near("dsink", found, expected, tolerance(dtype));
        let ProjectionGradients::Flat { dq, flat } = gradients.projections else {
            panic!("expected the flat buffer")
        };
        assert!(doubles(dq).iter().all(|x| *x == 0.0));
        assert_eq!(doubles(flat), [vec![1.0; 160], vec![0.0; 160]].concat());
    }
}

/// Compares the largest scores with loops in f64 over the visible keys of each query.
#[test]
fn the_largest_scores_are_those_of_the_visible_products() {
    let of_ranges = Case {
        causal: false,
        // The second query has no visible key.
        ranges: Some(vec![0..3, 3..3, 4..9, 9..50, 20..70]),
        scale: Some(0.9),
        ..Case::new(1, 5, 70, heads(2, 1, 16))
    };
    let documents = Case {
        ends: Some(vec![5, 6, 71]),
        window: Some((9, 0)),
        ..Case::new(2, 71, 71, heads(4, 2, 16))
    };
    let sunk = Case {
        sink: true,
        ..Case::new(2, 37, 40, heads(6, 3, 16))
    };
    for case in [of_ranges, documents, sunk] {
        let inputs = case.inputs();
        for Tested {
            device,
            engine,
            types,
        } in tested()
        {
            for dtype in types {
                let [q, k, v] = [0, 1, 2].map(|i| plain::<4>(&inputs[i], &device, dtype));
                let sink = case
                    .sink
                    .then(|| plain::<1>(&inputs[3], &device, wide(dtype)));
                let [of_q, of_k] = [&q, &k].map(|x| doubles(x.clone()));
                let options = case.options(&device);
                let problem =
                    AttentionProblem::separate([&q, &k, &v], sink.as_ref(), &options).unwrap();
                let inputs = AttentionInputs {
                    projections: Projections::Separate { q, k, v },
                    sink: sink.clone(),
                };
                let plain = engine.forward(&problem, inputs.clone());
                let measured = AttentionProblem {
                    with_max: true,
                    ..problem.clone()
                };
                let AttentionOutputs { out, lse, largest } = engine.forward(&measured, inputs);
                assert_eq!(
                    [doubles(out), doubles(lse)],
                    [doubles(plain.out), doubles(plain.lse)]
                );

                let Heads {
                    heads,
                    groups,
                    width,
                } = problem.heads;
                let band = mask::MaskRange::new(problem.queries, problem.keys, &options);
                let visible = band.all(problem.queries, options.ranges.as_ref());
                let score = |batch: usize, head: usize, query: usize, key: usize| {
                    let group = head / (heads / groups);
                    let q = ((batch * problem.queries + query) * heads + head) * width;
                    let k = ((batch * problem.keys + key) * groups + group) * width;
                    let products = (0..width).map(|w| of_q[q + w] * of_k[k + w]);
                    products.sum::<f64>() * problem.scale
                };
                let rows = (0..problem.batch * heads * problem.queries).map(|row| {
                    let (head, query) = (row / problem.queries, row % problem.queries);
                    let keys = visible[query].clone();
                    let scores = keys.map(|key| score(head / heads, head % heads, query, key));
                    scores.fold(-1e30, f64::max)
                });
                let found = doubles(largest.unwrap())
                    .into_iter()
                    .map(|x| x.max(-1e30))
                    .collect();
                let tolerance = if dtype == DType::F64 { 1e-13 } else { 1e-5 };
                assert_near(
                    &format!("{case:?} {dtype:?}"),
                    found,
                    rows.collect(),
                    tolerance,
                );
            }
        }
    }
}

//! Tests collectives in chunks: the results, the number of bytes, and the overlap with matmuls.

use std::time::Duration;

use burn::tensor::{DType, Device, Tensor};

use super::case::{Case, TestTensor};
use super::overlap::{Journal, Spans, second_subscriber, slow};
use super::references::backward;
use super::{autodiff, in_layout, leaf, wave};
use crate::comm::{CommError, ParallelContext, World};
use crate::mesh::{ParallelConfig, TpCommOverlap};
use crate::nn::*;
use burn_megatron_comm_testing::{Link, MatmulClock, SimulatedNetwork, Transfer, hidden_share};

const BATCH: usize = 2;
const SEQ: usize = 16;
const HIDDEN: usize = 12;
const WIDTH: usize = 20;

fn plain(tensor: usize) -> ParallelConfig {
    ParallelConfig::new()
        .with_tensor(tensor)
        .with_sequence_parallel(true)
}

fn ring(tensor: usize) -> ParallelConfig {
    plain(tensor).with_tp_comm_overlap(TpCommOverlap::Ring)
}

/// Returns a ring layout with one chunk for each rank.
fn whole_ring(tensor: usize) -> ParallelConfig {
    ring(tensor).with_tp_comm_overlap_num_splits(1)
}

fn bulk(tensor: usize, splits: usize) -> ParallelConfig {
    let layout = plain(tensor).with_tp_comm_overlap(TpCommOverlap::Bulk);
    layout.with_tp_comm_overlap_num_splits(splits)
}

/// A layout, as a function of the number of tensor ranks.
type LayoutOn = fn(usize) -> ParallelConfig;

const METHODS: [(&str, LayoutOn); 5] = [
    ("ring", ring),
    ("a ring of one chunk for each rank", whole_ring),
    ("a ring of 4 chunks for each rank", |tensor| {
        ring(tensor).with_tp_comm_overlap_num_splits(4)
    }),
    ("2 chunks in bulk", |tensor| bulk(tensor, 2)),
    ("4 chunks in bulk", |tensor| bulk(tensor, 4)),
];

fn along(dim: usize, width: usize) -> TestTensor<'static> {
    TestTensor {
        shape: [BATCH, SEQ, width],
        placement: match dim {
            1 => &|n| Placement::split(1, SEQ, n),
            _ => &|n| Placement::split(2, WIDTH, n),
        },
    }
}

#[test]
fn a_column_parallel_layer_computes_the_same() {
    let config = ColumnParallelLinearConfig::new(HIDDEN, WIDTH).with_init(Init::Normal(0.5));
    for (name, layout) in METHODS {
        let case = Case {
            input: along(1, HIDDEN),
            output: along(2, WIDTH),
            build: &|builder| config.init(builder),
            forward: &|layer: &ColumnParallelLinear, x| layer.forward(x),
        };
        case.check_in(name, layout);
    }
}

#[test]
fn a_row_parallel_layer_computes_the_same() {
    let config = RowParallelLinearConfig::new(WIDTH, HIDDEN).with_init(Init::Normal(0.5));
    for (name, layout) in METHODS {
        let case = Case {
            input: along(2, WIDTH),
            output: along(1, HIDDEN),
            build: &|builder| config.init(builder),
            forward: &|layer: &RowParallelLinear, x| layer.forward(x),
        };
        case.check_in(name, layout);
    }
}

/// Returns a column-parallel and a row-parallel layer on a rank, without biases.
fn layers(groups: &ParallelContext) -> (ColumnParallelLinear, RowParallelLinear) {
    let builder = ModelBuilder::with(groups, &autodiff(), 7, DType::F64);
    let column = ColumnParallelLinearConfig::new(HIDDEN, WIDTH).with_bias(false);
    let row = RowParallelLinearConfig::new(WIDTH, HIDDEN).with_bias(false);
    (
        column.init(&builder.child("column")).unwrap(),
        row.init(&builder.child("row")).unwrap(),
    )
}

/// Returns the inputs of both layers on a rank: the rank's part of the tokens, and the rank's features of all tokens.
fn inputs(tensor: usize) -> [Tensor<3>; 2] {
    [
        wave([BATCH, SEQ / tensor, HIDDEN], 0.5),
        wave([BATCH, SEQ, WIDTH / tensor], 0.5),
    ]
}

/// Returns the events of rank 0 in the forward pass and the backward pass of both layers, in order.
fn events(layout: &ParallelConfig, tracks_input: bool) -> [Vec<String>; 4] {
    let _second = second_subscriber();
    let of_ranks = in_layout(layout, |groups| {
        let journal = Journal::default();
        let slow = slow(groups.tensor(), &journal);
        let (column, row) = layers(&groups.clone().with_tensor(slow));
        let take = || std::mem::take(&mut *journal.lock().unwrap());
        tracing::subscriber::with_default(Spans(journal.clone(), true), || {
            let [x, z] = inputs(layout.tensor).map(|x| match tracks_input {
                true => leaf(x),
                false => Tensor::from_inner(x),
            });
            let y = column.forward(x);
            let forward = take();
            let _ = backward(&y);
            let of_column = [forward, take()];
            let y = row.forward(z);
            let forward = take();
            let _ = backward(&y);
            let [first, second] = of_column;
            [first, second, forward, take()]
        })
    });
    of_ranks.into_iter().next().unwrap()
}

#[test]
fn a_chunk_of_a_ring_travels_while_another_is_computed() {
    let [forward, backward, row_forward, row_backward] = events(&whole_ring(2), true);
    let gather = ["start all_to_all", "product", "end all_to_all", "product"];
    assert_eq!(forward, gather);
    // The input is gathered during the matmul of the input gradient, and the input gradient is reduced during the
    // matmul of the weight gradient.
    let reduce = ["product", "start all_to_all", "product"];
    let of_weight = ["weight gradient", "end all_to_all", "weight gradient"];
    let end = ["end all_to_all"];
    let expected = [&gather[..1], &reduce, &of_weight, &end].concat();
    assert_eq!(backward, expected);
    assert_eq!(row_forward, [&reduce[..], &end].concat());
    assert_eq!(row_backward, [&gather[..], &["weight gradient"]].concat());
}

#[test]
fn collectives_in_bulk_travel_while_another_chunk_is_computed() {
    let [forward, backward, row_forward, row_backward] = events(&bulk(2, 2), true);
    let gather = [
        "start all_gather",
        "end all_gather",
        "start all_gather",
        "product",
        "end all_gather",
        "product",
    ];
    assert_eq!(forward, gather);
    let reduce = [
        "product",
        "start reduce_scatter",
        "product",
        "start reduce_scatter",
    ];
    let ends = ["end reduce_scatter"; 2];
    let of_weight = [
        "end all_gather",
        "start all_gather",
        "weight gradient",
        "end all_gather",
        "weight gradient",
    ];
    let expected = [&gather[..1], &reduce, &of_weight, &ends].concat();
    assert_eq!(backward, expected);
    assert_eq!(row_forward, [&reduce[..], &ends].concat());
    assert_eq!(row_backward, [&gather[..], &["weight gradient"]].concat());
}

/// Without an input gradient, the gather overlaps with the matmul of the weight gradient.
#[test]
fn what_is_not_needed_is_not_communicated() {
    let [_, column, _, row] = events(&whole_ring(2), false);
    let of_weight = [
        "start all_to_all",
        "weight gradient",
        "end all_to_all",
        "weight gradient",
    ];
    assert_eq!(column, of_weight);
    assert_eq!(row, of_weight);
}

/// Returns the transfers on each rank in the forward passes and backward passes of both layers. The collective of a
/// layer takes the same time as each of its matmuls.
fn transfers(layout: &ParallelConfig) -> Vec<Vec<Vec<Transfer>>> {
    let _second = second_subscriber();
    let tensor = layout.tensor;
    let rows = BATCH * SEQ;
    // The collective and the matmul each take one second.
    let flops = 2 * rows * HIDDEN * WIDTH / tensor;
    let sent = rows * HIDDEN * 8 * (tensor - 1) / tensor;
    in_layout(layout, |groups| {
        let link = Link::with_virtual_clock(Duration::ZERO, sent as f64).unwrap();
        let network = SimulatedNetwork::over(groups.tensor().clone(), &link);
        let (column, row) = layers(&groups.clone().with_tensor(network));
        let clock = MatmulClock {
            link: link.clone(),
            flops_per_second: flops as f64,
        };
        tracing::subscriber::with_default(clock, || {
            let [x, z] = inputs(tensor).map(leaf);
            let mut all = vec![];
            let y = column.forward(x);
            all.push(link.take_transfers());
            let _ = backward(&y);
            all.push(link.take_transfers());
            let y = row.forward(z);
            all.push(link.take_transfers());
            let _ = backward(&y);
            all.push(link.take_transfers());
            all
        })
    })
}

#[test]
fn as_many_bytes_are_sent_and_most_of_their_time_is_hidden() {
    for tensor in [2, 4] {
        let expected = transfers(&plain(tensor));
        let bytes = |transfers: &[Transfer]| -> u64 { transfers.iter().map(|it| it.bytes).sum() };
        // Each matmul takes the same time as its collective.
        for (layout, least) in [
            (ring(tensor), 0.74),
            (bulk(tensor, 4), 0.74),
            (bulk(tensor, 2), 0.49),
        ] {
            for (rank, passes) in transfers(&layout).iter().enumerate() {
                for (pass, found) in passes.iter().enumerate() {
                    let expected = &expected[rank][pass];
                    assert_eq!(bytes(found), bytes(expected), "{layout:?}, pass {pass}");
                    let hidden = hidden_share(found);
                    assert!(hidden >= least, "{layout:?}, pass {pass}: {hidden}");
                }
            }
        }
        for forward in expected.iter().flat_map(|passes| [&passes[0], &passes[2]]) {
            assert_eq!(hidden_share(forward), 0.0);
        }
    }
}

#[test]
fn chunks_that_do_not_divide_the_tokens_are_refused() {
    let layout = bulk(2, 3);
    let run = |rank| {
        let groups = ParallelContext::new(&layout, &rank).unwrap();
        layers(&groups).0.forward(leaf(inputs(2)[0].clone()));
        Ok::<_, CommError>(())
    };
    let error = World::threads(2).unwrap().run(run).unwrap_err().to_string();
    let expected = "cannot make 3 equal chunks of the 8 tokens of a sequence on each tensor rank: expected \
                    tp_comm_overlap_num_splits of 2, 4, 8, or tp_comm_overlap = ring";
    assert!(error.contains(expected), "{error}");
}

/// The scale of an FP8 tensor covers all its rows.
#[test]
fn layers_in_8_bits_are_refused() {
    in_layout(&ring(2), |groups| {
        let fp8 = fp8::Fp8Config {
            recipe: Some("mxfp8".parse().unwrap()),
            ..fp8::Fp8Config::default()
        };
        let builder = ModelBuilder::new(&groups, &Device::flex());
        let builder = builder.with_fp8(&fp8).unwrap();
        let column = ColumnParallelLinearConfig::new(64, 64).init(&builder.child("up"));
        let row = RowParallelLinearConfig::new(64, 64).init(&builder.child("down"));
        for (path, error) in [("up", column.err()), ("down", row.err())] {
            let error = error.unwrap().to_string();
            let expected = format!("{path}: tp_comm_overlap = ring conflicts with FP8 layers");
            assert!(error.starts_with(&expected), "{error}");
        }
    });
}

/// With a frozen weight only the input gradient is computed.
#[test]
fn a_frozen_weight_is_not_gathered_for() {
    in_layout(&bulk(2, 2), |groups| {
        let journal = Journal::default();
        let slow = slow(groups.tensor(), &journal);
        let (mut column, _) = layers(&groups.clone().with_tensor(slow));
        column.weight = column.weight.set_require_grad(false);
        let y = column.forward(leaf(inputs(2)[0].clone()));
        journal.lock().unwrap().clear();
        let _ = backward(&y);
        let events = journal.lock().unwrap();
        assert!(
            events.iter().all(|event| event.contains("reduce_scatter")),
            "{events:?}"
        );
    });
}

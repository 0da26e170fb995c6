//! Tests the results and the communication volume of the flex dispatcher, on one node and on several nodes, in the
//! dtype of the model and in FP8.

use std::sync::{Arc, Mutex};

use super::*;
use crate::comm::{Call, Communicator, Pending, Rank};
use crate::mesh::AxisSet;
use crate::nn::tests::leaf;
use burn_megatron_comm_testing::Intercept;

/// Layouts with this number of ranks per node.
const NODES: [(Sizes, usize); 6] = [
    ([1, 4, 1, 1], 2),
    ([2, 2, 2, 1], 2),
    ([2, 4, 2, 1], 4),
    // One rank of each group per node, all ranks on one node, and unequal numbers.
    ([1, 4, 1, 1], 1),
    ([1, 4, 1, 1], 8),
    ([1, 4, 1, 1], 3),
];

fn flex() -> MoeMlpConfig {
    let shared = SharedExpertsConfig::new(4).with_gate(true);
    config(router())
        .with_dispatcher(DispatcherKind::Flex)
        .with_shared(Some(shared))
}

#[test]
fn a_token_is_sent_to_each_node_once() {
    let config = flex();
    let expected = Dense::new(&config).run(None);
    for (sizes, ranks) in NODES {
        for recompute in [false, true] {
            let run = Run {
                ranks_per_node: Some(ranks),
                recompute,
                ..Run::default()
            };
            let found = run.on(sizes, &config);
            found.assert_near(&expected, &format!("{sizes:?}, nodes of {ranks}"));
        }
    }
}

/// The sum of two terms does not depend on their order.
#[test]
fn two_experts_of_a_token_have_the_same_bits_as_with_an_all_to_all() {
    let other = flex().with_dispatcher(DispatcherKind::AllToAll);
    for sizes in [[1, 2, 1, 1], [1, 4, 1, 1], [1, 2, 1, 2]] {
        let [found, expected] = [flex(), other.clone()].map(|it| Run::default().on(sizes, &it));
        assert_eq!(found.output, expected.output, "{sizes:?}");
        assert_eq!(found.input_gradient, expected.input_gradient, "{sizes:?}");
        assert_eq!(found.parameters, expected.parameters, "{sizes:?}");
    }
}

/// Features that are a hundred times larger than other features of their block are kept, and small features are
/// rounded.
#[test]
fn tokens_in_8_bits_are_rounded_by_the_scale_of_their_block() {
    let plain = Run::default().on(ONE, &flex());
    for scales in [Fp8DispatchScales::F32, Fp8DispatchScales::E8m0] {
        let config = flex().with_fp8_dispatch(Some(scales));
        let one = Run::default().on(ONE, &config);
        assert_ne!(one.output, plain.output);
        // An E4M3 code has four significant bits.
        let error = |found: &[f64], exact: &[f64]| {
            let square =
                |values: &mut dyn Iterator<Item = f64>| -> f64 { values.map(|x| x * x).sum() };
            let off = square(&mut found.iter().zip(exact).map(|(a, b)| a - b));
            (off / square(&mut exact.iter().copied())).sqrt()
        };
        let off = error(&one.output, &plain.output);
        assert!(off < 0.06, "{scales:?}: {off}");
        // Rows to the own rank are rounded too, so that results do not depend on the layout.
        for sizes in [[1, 4, 1, 1], [2, 2, 2, 1], [1, 2, 1, 2]] {
            let found = Run::default().on(sizes, &config);
            found.assert_near(&one, &format!("{scales:?} on {sizes:?}"));
        }
        let nodes = Run {
            ranks_per_node: Some(2),
            ..Run::default()
        };
        // Rows are not rounded again when they are forwarded.
        let found = nodes.on([1, 4, 1, 1], &config);
        found.assert_near(&one, &format!("{scales:?}, nodes"));
    }
}

#[test]
fn a_dispatch_in_8_bits_needs_the_flex_dispatcher() {
    let builder = ModelBuilder::new(&ParallelContext::single(), &Device::flex());
    let config = config(router()).with_fp8_dispatch(Some(Fp8DispatchScales::F32));
    let message = config.init(&builder).unwrap_err().to_string();
    assert!(
        message.ends_with("expected the flex dispatcher, or no fp8_dispatch"),
        "{message}"
    );
}

/// The bytes that a rank sends to other ranks of its node, and to other nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sent {
    inside: usize,
    between: usize,
}

#[derive(Debug, Default)]
struct Journal {
    sent: Sent,
    calls: Vec<String>,
}

/// Wraps a communicator to count the bytes that an all-to-all sends to other ranks. Other calls exchange row counts.
fn counting(
    inner: Arc<dyn Communicator>,
    ranks_per_node: usize,
    journal: Arc<Mutex<Journal>>,
) -> Arc<dyn Communicator> {
    Intercept::over(inner, move |inner, call, input| {
        let mut seen = journal.lock().unwrap();
        seen.calls.push(format!("start {}", call.name()));
        if let Call::AllToAll { send, .. } = &call {
            let node = |rank: usize| rank / ranks_per_node;
            let own = inner.group().world_rank();
            for (rank, elements) in inner.group().ranks().iter().zip(send) {
                let bytes = elements * input.dtype().size_of();
                match *rank {
                    rank if rank == own => {}
                    rank if node(rank) == node(own) => seen.sent.inside += bytes,
                    _ => seen.sent.between += bytes,
                }
            }
        }
        drop(seen);
        let (name, journal) = (call.name(), journal.clone());
        let pending = inner.start(call, input)?;
        Ok(Pending::new(move || {
            journal.lock().unwrap().calls.push(format!("end {name}"));
            pending.wait()
        }))
    })
}

/// Returns the groups of a rank with counting communicators.
fn counted(
    sizes: Sizes,
    ranks_per_node: Option<usize>,
    rank: &Rank,
) -> Result<(ParallelContext, Arc<Mutex<Journal>>), AnyError> {
    let mut parallel = layout(sizes);
    parallel.ranks_per_node = ranks_per_node;
    let mut groups = ParallelContext::from_world(&parallel, rank.communicator())?;
    let journal = Arc::new(Mutex::new(Journal::default()));
    // The same group may appear twice in this list, but is counted once.
    let all = [
        AxisSet::from([Axis::Expert, Axis::ExpertTensor]),
        Axis::Expert.into(),
        Axis::ExpertTensor.into(),
    ];
    let inner = all.map(|axes| groups.group(Grid::Expert, axes));
    for (axes, inner) in all.into_iter().zip(inner) {
        let ranks_per_node = ranks_per_node.unwrap_or(usize::MAX);
        let counting = counting(inner?, ranks_per_node, journal.clone());
        groups = groups.with_group(Grid::Expert, axes, counting);
    }
    Ok((groups, journal))
}

/// Returns every choice of `k` of `experts` experts, which has the mean of uniform choices.
fn subsets(experts: usize, k: usize) -> Vec<i64> {
    let all = 0usize..1 << experts;
    let of_size = all.filter(|set| set.count_ones() as usize == k);
    let members = |set: usize| (0..experts as i64).filter(move |expert| set >> expert & 1 == 1);
    of_size.flat_map(members).collect()
}

/// Sends every token through identity experts. Returns the volume of each rank in the forward pass and in the backward
/// pass.
fn sent(
    kind: DispatcherKind,
    problem: &DispatchProblem,
    sizes: Sizes,
    node: Option<usize>,
) -> Vec<[Sent; 2]> {
    let rank = |rank: Rank| {
        let (groups, journal) = counted(sizes, node, &rank)?;
        let take = || std::mem::take(&mut journal.lock().unwrap().sent);
        let choices = subsets(problem.experts, problem.per_token);
        let (tokens, k) = (problem.tokens, problem.per_token);
        let options = (&Device::flex(), DType::F32);
        let x = leaf(Tensor::<2>::ones([tokens, problem.hidden], options));
        let weights = leaf(Tensor::<2>::ones([tokens, k], options));
        let routing = Routing {
            logits: Tensor::zeros([tokens, problem.experts], options),
            indices: ints(&choices, [tokens, k]),
            weights: weights.clone(),
            rows_per_expert: None,
        };
        let dispatcher = kind.init(problem.experts, problem.fp8, &groups)?;
        take();
        let started = dispatcher.start(&routing);
        let dispatched = started.dispatch(x.clone(), &mut Exchanges::default());
        let experts = |rows: ExpertRows| rows.rows * rows.weights.unsqueeze_dim(1);
        let y = dispatched.apply(experts, &mut Exchanges::default());
        let forward = take();
        let gradients = y.sum().backward();
        assert!(x.grad(&gradients).is_some() && weights.grad(&gradients).is_some());
        Ok::<_, AnyError>([forward, take()])
    };
    let ranks = sizes[1..].iter().product();
    World::threads(ranks).unwrap().run(rank).unwrap()
}

#[test]
fn every_dispatcher_sends_what_its_formula_says() {
    const F32: usize = 4;
    let eight_bits = [
        None,
        Some(Fp8DispatchScales::F32),
        Some(Fp8DispatchScales::E8m0),
    ];
    for kind in DISPATCHERS {
        for (expert, expert_tensor, node) in [
            (4, 1, None),
            (8, 1, None),
            (2, 2, None),
            (8, 1, Some(2)),
            (8, 1, Some(4)),
            (4, 2, Some(4)),
        ] {
            if node.is_some() && kind != DispatcherKind::Flex {
                continue;
            }
            for fp8 in eight_bits {
                if fp8.is_some() && kind != DispatcherKind::Flex {
                    continue;
                }
                let (experts, per_token) = (8, 3);
                let sizes = [expert_tensor, expert, expert_tensor, 1];
                let nodes = node.map(|ranks| DispatchNodes {
                    ranks,
                    experts: ranks / expert_tensor * (experts / expert),
                });
                let problem = DispatchProblem {
                    dispatcher: kind,
                    fp8,
                    tokens: subsets(experts, per_token).len() / per_token,
                    experts,
                    per_token,
                    groups: None,
                    // One and a half blocks, and not a multiple of 16.
                    hidden: 200,
                    expert,
                    expert_tensor,
                    nodes,
                };
                let expected = [
                    problem.forward_bytes(F32, F32),
                    problem.backward_bytes(F32, F32),
                ];
                for found in sent(kind, &problem, sizes, node) {
                    let what = format!("{problem:?}");
                    for (found, expected) in found.iter().zip(expected) {
                        let near = |found: usize, expected: f64, of: &str| {
                            let off = (found as f64 - expected).abs();
                            assert!(
                                off < 1e-6 * expected + 1e-6,
                                "{what}, {of}: {found}, not {expected}"
                            );
                        };
                        near(found.inside, expected.inside, "inside");
                        near(found.between, expected.between, "between");
                    }
                }
            }
        }
    }
}

/// Counts are exchanged before anything else. Shared experts run while rows are exchanged.
#[test]
fn counts_travel_once_the_router_is_done() {
    for kind in DISPATCHERS {
        let rank = |rank: Rank| {
            let (groups, journal) = counted([1, 2, 1, 1], None, &rank)?;
            let take = || std::mem::take(&mut journal.lock().unwrap().calls);
            let options = (&Device::flex(), DType::F64);
            let routing = Routing {
                logits: Tensor::zeros([3, EXPERTS], options),
                indices: ints(&choices(3), [3, 2]),
                weights: Tensor::ones([3, 2], options),
                rows_per_expert: None,
            };
            let dispatcher = kind.init(EXPERTS, None, &groups)?;
            take();
            let started = dispatcher.start(&routing);
            let before = take();
            let work = journal.clone();
            let meanwhile = move || work.lock().unwrap().calls.push("shared".into());
            let mut exchanges = Exchanges {
                meanwhile: Some(Box::new(meanwhile)),
                ..Exchanges::default()
            };
            let _ = started.dispatch(Tensor::ones([3, HIDDEN], options), &mut exchanges);
            Ok::<_, AnyError>((before, take()))
        };
        for (before, after) in World::threads(2).unwrap().run(rank).unwrap() {
            assert_eq!(before, ["start all_gather"], "{kind:?}");
            assert_eq!(after[0], "end all_gather", "{kind:?}");
            let at = |event: &str| after.iter().position(|other| other == event).unwrap();
            if kind != DispatcherKind::AllGather {
                let shared = at("start all_to_all")..at("end all_to_all");
                assert!(shared.contains(&at("shared")), "{kind:?}: {after:?}");
            }
        }
    }
}

fn choices(tokens: usize) -> Vec<i64> {
    (0..tokens as i64)
        .flat_map(|token| [token % 4, (token + 1) % 4])
        .collect()
}

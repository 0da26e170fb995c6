//! Tests the dispatchers alone, with experts that multiply by a number.

use super::*;
use crate::nn::tests::leaf;

/// Returns the factor of an expert.
fn factor(expert: usize) -> f64 {
    expert as f64 + 1.5
}

/// The numbers of tokens of the ranks, which differ and include 0.
const TOKENS: [usize; 4] = [0, 5, 1, 3];
const K: usize = 2;

/// Returns two different experts for each token. Expert 2 has few tokens.
fn choices(tokens: usize, rank: usize) -> Vec<i64> {
    let of_token = |token: usize| {
        let first = [0, 1, 3][(token + rank) % 3];
        [first, if token == 1 { 2 } else { (first + 1) % 2 }]
    };
    (0..tokens).flat_map(of_token).collect()
}

/// Multiplies each row by its weight, the factor of its expert, and `share`.
fn multiplied(input: ExpertRows, first: usize, share: f64) -> Tensor<2> {
    let of_expert = |(local, rows): (usize, &usize)| vec![factor(first + local) * share; *rows];
    let sizes = input.group_sizes.iter().enumerate();
    let factors: Vec<f64> = sizes.flat_map(of_expert).collect();
    let rows = factors.len();
    let factors = TensorData::new(factors, [rows]);
    let factors: Tensor<1> = Tensor::from_data(factors, (&input.rows.device(), DType::F64));
    input.rows * (input.weights * factors).unsqueeze_dim(1)
}

/// A rank without tokens works in forward and backward, and the other ranks get their tokens back.
#[test]
fn a_rank_without_tokens() {
    let nodes = DISPATCHERS.map(|kind| (kind, 4)).into_iter();
    for (kind, ranks_per_node) in nodes.chain([(DispatcherKind::Flex, 2)]) {
        for sizes in [[1, 4, 1, 1], [2, 2, 2, 1], [2, 1, 4, 1], [1, 2, 1, 2]] {
            let rank = |rank: crate::comm::Rank| {
                let layout = layout(sizes).with_ranks_per_node(ranks_per_node);
                let ctx = ParallelContext::from_world(&layout, rank.communicator())?;
                let what = format!("{kind:?} on {sizes:?}, {ranks_per_node} on a node");
                a_rank(&ctx, kind, &what)
            };
            World::threads(4).unwrap().run(rank).unwrap();
        }
    }
}

fn a_rank(ctx: &ParallelContext, kind: DispatcherKind, what: &str) -> Result<(), AnyError> {
    let [expert, tensor] =
        [Axis::Expert, Axis::ExpertTensor].map(|axis| ctx.mesh_rank().on(Grid::Expert, axis));
    let number = ctx.world().rank();
    let tokens = TOKENS[number];
    let chosen = choices(tokens, number);
    let [x, dy] = [0.5, 2.5].map(|phase| wave([tokens, HIDDEN], phase + number as f64));
    let weights = wave([tokens, K], 4.0 + number as f64);
    let (x, weights) = (leaf(x), leaf(weights));
    let routing = Routing {
        logits: Tensor::zeros([tokens, EXPERTS], (&Device::flex(), DType::F64)),
        indices: ints(&chosen, [tokens, K]),
        weights: weights.clone(),
        rows_per_expert: None,
    };
    let dispatcher = kind.init(EXPERTS, None, ctx)?;
    let started = dispatcher.start(&routing);
    let dispatched = started.dispatch(x.clone(), &mut Exchanges::default());
    let first = expert.index * (EXPERTS / expert.size);
    // Each expert-tensor rank has an equal part of the sum.
    let experts = |rows| multiplied(rows, first, 1.0 / tensor.size as f64);
    let y = dispatched.apply(experts, &mut Exchanges::default());
    assert_eq!(y.dims(), [tokens, HIDDEN], "{what}");
    let gradients = (y.clone() * Tensor::from_inner(dy.clone()))
        .sum()
        .backward();

    let [x_values, dy, weight_values] = [
        values(x.clone().inner()),
        values(dy),
        values(weights.clone().inner()),
    ];
    let of_token = |token: usize| {
        let pairs = token * K..(token + 1) * K;
        let sum: f64 = pairs
            .map(|pair| weight_values[pair] * factor(chosen[pair] as usize))
            .sum();
        sum
    };
    let times = |values: &[f64]| -> Vec<f64> {
        let at = values.iter().enumerate();
        at.map(|(at, value)| of_token(at / HIDDEN) * value)
            .collect()
    };
    let of_weights = (0..tokens * K).map(|pair| {
        let token = pair / K * HIDDEN..(pair / K + 1) * HIDDEN;
        let products = token.map(|at| x_values[at] * dy[at]);
        products.sum::<f64>() * factor(chosen[pair] as usize)
    });
    let found = [
        values(y.inner()),
        values(x.grad(&gradients).unwrap()),
        values(weights.grad(&gradients).unwrap()),
    ];
    let expected = [times(&x_values), times(&dy), of_weights.collect()];
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found.len(), expected.len(), "{what}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(
                (found - expected).abs() < 1e-12,
                "{what}: {found}, not {expected}"
            );
        }
    }
    Ok(())
}

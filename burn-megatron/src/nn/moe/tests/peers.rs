//! Compares with results of `transformers`, which `tests/fixtures/moe/make.py` has written.

use std::fs;

use burn_megatron_kernels::moe::router as kernels;
use safetensors::SafeTensors;

use super::*;
use crate::nn::tests::leaf;
use crate::optim::{AdamWConfig, ParallelAdamW};

const TOLERANCE: f64 = 1e-5;

struct Fixture(Vec<u8>);

impl Fixture {
    fn open(name: &str) -> Self {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/moe");
        Self(fs::read(format!("{folder}/{name}.safetensors")).unwrap())
    }

    fn tensor<const D: usize>(&self, name: &str) -> Tensor<D> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let view = file.tensor(name).unwrap();
        let shape: [usize; D] = view.shape().try_into().unwrap();
        let (values, _) = view.data().as_chunks();
        let values: Vec<f64> = values
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes).into())
            .collect();
        Tensor::from_data(
            TensorData::new(values, shape),
            (&Device::flex(), DType::F64),
        )
    }

    /// Compares with the tensor of this name.
    #[track_caller]
    fn assert_near<const D: usize>(&self, name: &str, found: Tensor<D>) {
        let expected: Tensor<D> = self.tensor(name);
        assert_eq!(found.dims(), expected.dims(), "{name}");
        assert_near(name, &values(found), &values(expected), TOLERANCE);
    }
}

impl Fixture {
    /// Returns the block of OLMoE: a softmax over all experts that is not normalized over the chosen experts.
    fn olmoe(&self) -> MoeMlpConfig {
        let [experts, hidden, width] = self.tensor::<3>("down").dims();
        let router = RouterConfig::new(hidden, experts, 3).with_score(ScoreFunction::PreSoftmax);
        MoeMlpConfig::new(router, width, Activation::SwiGlu)
    }

    /// Returns the layer with this rank's part of the weights. `ranks` ranks split the experts.
    fn olmoe_layer(&self, builder: &ModelBuilder, AxisRank { index, size }: AxisRank) -> MoeMlp {
        let part = |name: &str| {
            let all = self.tensor::<3>(name).swap_dims(1, 2);
            let own = all.dims()[0] / size;
            all.narrow(0, index * own, own)
        };
        let mut moe = self.olmoe().init(builder).unwrap();
        moe.router.gate = Param::from_tensor(leaf(self.tensor::<2>("gate").transpose()));
        moe.experts.up = Param::from_tensor(leaf(part("up")));
        moe.experts.down = Param::from_tensor(leaf(part("down")));
        moe
    }
}

#[test]
fn the_block_of_olmoe() {
    let fixture = Fixture::open("olmoe");
    let builder = ModelBuilder::with(&ParallelContext::single(), &Device::flex(), 7, DType::F64);
    let moe = fixture.olmoe_layer(&builder, AxisRank { index: 0, size: 1 });
    let x = leaf(fixture.tensor::<3>("x"));
    let y = moe.forward(x.clone());
    fixture.assert_near("y", y.clone().inner());
    let weight = Tensor::from_inner(fixture.tensor::<3>("weight"));
    let gradients = (y * weight).sum().backward();
    fixture.assert_near("d_x", x.grad(&gradients).unwrap());
    let gate = moe.router.gate.val().grad(&gradients).unwrap();
    fixture.assert_near("d_gate", gate.transpose());
    for (name, param) in [("d_up", &moe.experts.up), ("d_down", &moe.experts.down)] {
        let gradient = param.val().grad(&gradients).unwrap();
        fixture.assert_near(name, gradient.swap_dims(1, 2));
    }
}

/// Compares the losses of 20 AdamW steps, with the experts on 1, 2 and 4 ranks. Each rank has a part of the batch.
#[test]
fn the_block_of_olmoe_trains_on_any_number_of_expert_ranks() {
    let losses = |expert: usize| {
        let rank = |rank: crate::comm::Rank| {
            let ctx = ParallelContext::from_world(&layout([1, expert, 1, 1]), rank.communicator())?;
            let place = ctx.mesh_rank().on(Grid::Expert, Axis::Expert);
            let (fixture, device) = (Fixture::open("olmoe"), Device::flex());
            let builder = ModelBuilder::with(&ctx, &device, 7, DType::F64);
            let moe = fixture.olmoe_layer(&builder.child("moe"), place);
            let mut ddp = DistributedDataParallel::new(builder.finish(Wrapper { moe })?, &ctx)?;
            let mut optimizer = ParallelAdamW::new(&AdamWConfig::default(), &ddp)?;
            let own = |name: &str| {
                let all = fixture.tensor::<3>(name);
                let rows = all.dims()[0] / place.size;
                Tensor::from_inner(all.narrow(0, place.index * rows, rows))
            };
            let (x, target) = (own("batch"), own("target"));
            let [batch, seq, _] = x.dims();
            let mut losses = vec![];
            for _ in 0..20 {
                let y = ddp.forward(&device, |model| model.moe.forward(x.clone()));
                let loss = (y - target.clone()).square().sum();
                losses.push(values(loss.clone().inner())[0] / 24.0);
                ddp.backward_last(loss);
                let gradients = ddp.reduce((batch * seq) as u64)?;
                optimizer.step(0.01, &mut ddp, gradients);
            }
            Ok::<_, AnyError>(losses)
        };
        let all = World::threads(expert).unwrap().run(rank).unwrap();
        let sum = |step: usize| all.iter().map(|losses| losses[step]).sum();
        (0..20).map(sum).collect::<Vec<f64>>()
    };
    let expected = values(Fixture::open("olmoe").tensor::<1>("losses"));
    for expert in [1, 2, 4] {
        assert_near(
            &format!("expert {expert}"),
            &losses(expert),
            &expected,
            1e-4,
        );
    }
}

/// Uses sigmoid scores with a bias that only affects the choice, two of four groups selected by the sum of their two
/// best scores, and a factor.
#[test]
fn the_router_of_deepseek_v3() {
    let fixture = Fixture::open("deepseek_v3");
    let options = kernels::RouterOptions {
        score: kernels::ScoreFunction::Sigmoid,
        scaling_factor: 2.5,
        groups: Some(kernels::ExpertGroups {
            groups: 4,
            chosen: 2,
            score: kernels::GroupScore::SumOf(2),
        }),
        ..kernels::RouterOptions::new(4)
    };
    let x = leaf(fixture.tensor::<2>("x"));
    let gate = leaf(fixture.tensor::<2>("gate"));
    let logits = x.clone().matmul(gate.clone().transpose());
    let bias = Tensor::from_inner(fixture.tensor::<1>("bias"));
    let (indices, weights) = kernels::top_k_router(logits, &options, Some(bias));

    let expected = fixture.tensor::<2>("weights");
    let [tokens, experts] = expected.dims();
    let mut found = vec![0.0; tokens * experts];
    let mut places = vec![];
    for (pair, expert) in read(indices).into_iter().enumerate() {
        places.push(pair / 4 * experts + usize::try_from(expert).unwrap());
    }
    for (place, weight) in places.iter().zip(values(weights.clone().inner())) {
        found[*place] = weight;
    }
    assert_near("weights", &found, &values(expected), TOLERANCE);

    let weight = values(fixture.tensor::<2>("weight"));
    let weight = places.iter().map(|place| weight[*place]).collect();
    let weight = TensorData::new(weight, [tokens, 4]);
    let weight = Tensor::from_inner(Tensor::<2>::from_data(
        weight,
        (&Device::flex(), DType::F64),
    ));
    let gradients = (weights * weight).sum().backward();
    fixture.assert_near("d_x", x.grad(&gradients).unwrap());
    fixture.assert_near("d_gate", gate.grad(&gradients).unwrap());
}

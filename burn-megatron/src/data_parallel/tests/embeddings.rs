//! Gradients of embeddings, from sorted lookups and from ids only.

use burn::tensor::{DType, Int, TensorData};

use super::gradient_checks::stage;
use super::*;
use crate::nn::{
    BatchFormat, Init, LearnedPositions, LearnedPositionsConfig, ModelBuilder, PackedSequences,
    Tokens, VocabParallelEmbedding, VocabParallelEmbeddingConfig, Vocabulary,
};

const SHAPE: [usize; 2] = [3, 8];
const TOKENS: usize = 11;
const HIDDEN: usize = 6;

#[derive(Module, Debug)]
struct Model {
    embedding: VocabParallelEmbedding,
    positions: LearnedPositions,
}

fn build(groups: &ParallelContext, dtype: DType, sequence_parallel: bool) -> ParallelModule<Model> {
    let scope = ModelBuilder::with(groups, &Device::flex(), 7, dtype);
    let scope = scope.with_sequence_parallel(sequence_parallel);
    let vocabulary = Vocabulary::padded(TOKENS, 1, groups.tensor().size());
    let embedding = VocabParallelEmbeddingConfig::new(vocabulary, HIDDEN)
        .with_init(Init::Normal(0.5))
        .init(&scope.child("embedding"));
    let positions = LearnedPositionsConfig::new(SHAPE[1], HIDDEN);
    let positions = positions.init(&scope.child("positions"));
    let embedding = embedding.unwrap();
    scope
        .finish(Model {
            embedding,
            positions,
        })
        .unwrap()
}

/// Returns the tokens of a micro-batch: token 3 often, and the first and the last token.
fn ids(micro_batch: i32) -> Vec<i32> {
    let last = TOKENS as i32 - 1;
    let id = |i: i32| match i % 4 {
        0 => 3,
        1 => (i * i + micro_batch) % 11,
        2 => 0,
        _ => last - i % 2 * micro_batch,
    };
    (0..(SHAPE[0] * SHAPE[1]) as i32).map(id).collect()
}

/// Returns the gradients of two micro-batches, with or without sorted lookups.
fn gradients(
    groups: &ParallelContext,
    config: &DataParallelConfig,
    (dtype, sequence_parallel, sorted): (DType, bool, bool),
) -> Result<Vec<TensorData>, RankError> {
    let model = build(groups, dtype, sequence_parallel);
    let mut ddp = DistributedDataParallel::with(model, groups, config)?;
    for micro_batch in 0..2 {
        let mut tokens = Tokens::new(&ids(micro_batch), SHAPE, &device());
        if !sorted {
            tokens.sorted = None;
        }
        let documents = [0, 3, 8, 16, 17, 24];
        let packed = PackedSequences::new(&documents, SHAPE, &device())?;
        let format = BatchFormat::Packed(Box::new(packed));
        let loss = ddp.forward(&device(), |model| {
            let x = model.embedding.forward(tokens);
            let x = model.positions.forward_with_format(x, &format);
            let factors =
                Tensor::<1, Int>::arange(1..x.shape().num_elements() as i64 + 1, &device());
            let factors = factors.float().cast(x.dtype()).reshape(x.dims()).sin();
            (x * factors).sum()
        });
        ddp.backward(loss);
    }
    let gradients = ddp.reduce(1)?;
    let full = ddp.full_gradients(&gradients).into_iter();
    Ok(full.map(Tensor::into_data).collect())
}

#[test]
fn sorted_lookups_give_the_bits_of_unsorted_ones() {
    for (tensor, data) in [(1, 1), (2, 1), (2, 2)] {
        for sequence_parallel in [false, tensor > 1] {
            for dtype in [DType::F32, DType::F64] {
                for number in [0, 2, 3] {
                    let run = |groups: &ParallelContext| {
                        let of = |sorted| {
                            gradients(groups, &stage(number), (dtype, sequence_parallel, sorted))
                        };
                        Ok((of(true)?, of(false)?))
                    };
                    for (sorted, unsorted) in over(tensor, data, run).unwrap() {
                        let all = sorted.iter().zip(&unsorted);
                        all.for_each(|(sorted, unsorted)| sorted.assert_eq(unsorted, true));
                        let values: Vec<f64> = sorted[0]
                            .clone()
                            .convert_dtype(DType::F64)
                            .try_into_vec()
                            .unwrap();
                        assert!(values.iter().any(|x| *x != 0.0));
                    }
                }
            }
        }
    }
}

#[test]
fn a_token_of_many_lookups_is_accumulated_in_f32() {
    let groups = ParallelContext::single();
    let config = DataParallelConfig {
        precision: Precision::Bf16,
        ..stage(0)
    };
    let model = build(&groups, DType::F32, false);
    let mut ddp = DistributedDataParallel::with(model, &groups, &config).unwrap();
    let loss = ddp.forward(&device(), |model| {
        let tokens = Tokens::new(&[2; 4000], [4, 1000], &device());
        model.embedding.forward(tokens).sum().cast(DType::F32)
    });
    ddp.backward_last(loss);
    let gradients = ddp.reduce(1).unwrap();
    let gradient = values(ddp.full_gradients(&gradients).remove(0));
    let mut expected = vec![0.0; TOKENS * HIDDEN];
    expected[2 * HIDDEN..3 * HIDDEN].fill(4000.0);
    assert_eq!(gradient, expected);
}

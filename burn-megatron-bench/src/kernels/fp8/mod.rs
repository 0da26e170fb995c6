//! FP8 benchmarks. Quantization is compared with a copy of the same number of bytes. FP8 matrix multiplications are
//! compared with the same multiplications in the dtype of the benchmark (`--dtype`).

mod products;
mod recipe;

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::kernels::fp8::Format;
use burn_megatron_cli::internal::Shape;

use super::pairs::{PairBenchmark, Pairs, TimedPair, draw, repeated, shape};
use recipe::ScalingRecipe;

/// The group name of these benchmarks.
pub const GROUP: &str = "fp8";

const PRODUCTS: [&[Shape]; 2] = [
    &[shape(256, 256), shape(512, 512), shape(1024, 1024)],
    &[shape(4096, 4096), shape(8192, 8192), shape(16384, 16384)],
];

/// Returns all FP8 benchmarks.
pub fn subjects() -> Vec<PairBenchmark> {
    use ScalingRecipe::{Blocks, Current, Delayed, Mx};
    let subject = |name, sizes, pairs| PairBenchmark {
        name,
        group: GROUP,
        sizes,
        pairs,
    };
    let quantize = |name, recipe: ScalingRecipe, square| {
        let pairs: Pairs = Box::new(move |shape, device, dtype| {
            vec![quantizer(recipe, square, shape, device, dtype)]
        });
        subject(name, [&[], &[]], pairs)
    };
    let product = |name, recipe: ScalingRecipe| {
        let pairs: Pairs =
            Box::new(move |shape, device, dtype| products::pairs(recipe, shape, device, dtype));
        subject(name, PRODUCTS, pairs)
    };
    vec![
        quantize("quantize-delayed", Delayed, false),
        quantize("quantize-current", Current, false),
        quantize("quantize-blocks", Blocks, false),
        quantize("quantize-squares", Blocks, true),
        quantize("quantize-mx", Mx, false),
        product("product-delayed", Delayed),
        product("product-blocks", Blocks),
        product("product-mx", Mx),
    ]
}

/// Returns the benchmark that quantizes a matrix row-wise and column-wise.
fn quantizer(
    recipe: ScalingRecipe,
    square: bool,
    shape: &Shape,
    device: &Device,
    dtype: DType,
) -> TimedPair {
    let x = draw([shape.rows, shape.width], device, dtype);
    let scale = Tensor::<1>::ones([1], device);
    // The scale of the whole matrix requires an additional pass over the matrix.
    let reads = if recipe == ScalingRecipe::Current {
        2
    } else {
        1
    };
    let run = move |(x, scale): (_, _)| recipe.quantize(x, Format::E4M3, square, &scale);
    let written = run((x.clone(), scale.clone()));
    TimedPair {
        direction: "both usage",
        bytes: reads * shape.elements() * dtype.size()
            + written.rowwise.bytes()
            + written.columnwise.bytes(),
        fused: repeated((x, scale), run),
        plain: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_subject_runs_in_both_forms() {
        let device = Device::flex();
        for subject in subjects() {
            let pairs = (subject.pairs)(&shape(32, 48), &device, DType::F32);
            assert!(!pairs.is_empty());
            for pair in pairs {
                assert!(pair.bytes > 32 * 48, "{}", subject.name);
                (pair.fused)()();
                let quantiser = subject.name.starts_with("quantize");
                assert_eq!(pair.plain.is_none(), quantiser, "{}", subject.name);
                if let Some(plain) = pair.plain {
                    plain()();
                }
            }
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = subjects().iter().map(|subject| subject.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), subjects().len());
    }
}

//! 8-bit floats: quantisers beside a copy of as many bytes, products and an MLP beside the same in the
//! type of the run.

mod mlp;
mod products;
mod quantisers;
mod recipe;

use burn::tensor::{DType, Device, Distribution, Tensor};

use super::case::Shape;
use super::timing::Work;
use recipe::Recipe;

/// The name of all of these subjects together.
pub const GROUP: &str = "fp8";

/// A subject of the table.
pub struct Subject {
    /// The name in the table.
    pub name: &'static str,
    /// The sizes without `--sizes`, on a CPU and elsewhere; those of the other operations if empty.
    pub sizes: [&'static [Shape]; 2],
    what: What,
    recipe: Recipe,
}

#[derive(Clone, Copy)]
enum What {
    Quantiser { square: bool },
    Product,
    Mlp,
}

/// What is timed at one size.
pub struct Contest {
    /// As the table writes it.
    pub direction: &'static str,
    /// What must be read and written at the least.
    pub bytes: usize,
    /// In 8 bits.
    pub fused: Work<'static>,
    /// The same in the type of the run.
    pub plain: Option<Work<'static>>,
}

const fn shape(rows: usize, width: usize) -> Shape {
    Shape { rows, width }
}

const PRODUCTS: [&[Shape]; 2] = [
    &[shape(256, 256), shape(512, 512), shape(1024, 1024)],
    &[shape(4096, 4096), shape(8192, 8192), shape(16384, 16384)],
];
const MLPS: [&[Shape]; 2] = [&[shape(1024, 384)], &[shape(16384, 4096)]];

/// All of them.
pub fn subjects() -> Vec<Subject> {
    use Recipe::{Blocks, Current, Delayed, Mx};
    let subject = |name, sizes, what, recipe| Subject {
        name,
        sizes,
        what,
        recipe,
    };
    let rows = What::Quantiser { square: false };
    let squares = What::Quantiser { square: true };
    let (product, mlp) = (What::Product, What::Mlp);
    vec![
        subject("quantize-delayed", [&[], &[]], rows, Delayed),
        subject("quantize-current", [&[], &[]], rows, Current),
        subject("quantize-blocks", [&[], &[]], rows, Blocks),
        subject("quantize-squares", [&[], &[]], squares, Blocks),
        subject("quantize-mx", [&[], &[]], rows, Mx),
        subject("product-delayed", PRODUCTS, product, Delayed),
        subject("product-blocks", PRODUCTS, product, Blocks),
        subject("product-mx", PRODUCTS, product, Mx),
        subject("mlp-delayed", MLPS, mlp, Delayed),
        subject("mlp-current", MLPS, mlp, Current),
        subject("mlp-blocks", MLPS, mlp, Blocks),
        subject("mlp-mx", MLPS, mlp, Mx),
    ]
}

impl Subject {
    /// What is timed at this size, with random values.
    pub fn contests(&self, shape: &Shape, device: &Device, dtype: DType) -> Vec<Contest> {
        match self.what {
            What::Quantiser { square } => {
                vec![quantisers::contest(
                    self.recipe,
                    square,
                    shape,
                    device,
                    dtype,
                )]
            }
            What::Product => products::contests(self.recipe, shape, device, dtype),
            What::Mlp => vec![mlp::contest(self.recipe, shape, device, dtype)],
        }
    }
}

fn draw(sizes: [usize; 2], device: &Device, dtype: DType) -> Tensor<2> {
    Tensor::<2>::random(sizes, Distribution::Normal(0.0, 1.0), device).cast(dtype)
}

/// Work without anything that is set up for each run.
fn repeated<T: Send>(work: impl Fn() -> T + Clone + Send + 'static) -> Work<'static> {
    Box::new(move || {
        let work = work.clone();
        Box::new(move || drop(work()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_subject_runs_in_both_forms() {
        let device = Device::flex();
        for subject in subjects() {
            let contests = subject.contests(&shape(32, 48), &device, DType::F32);
            assert!(!contests.is_empty());
            for contest in contests {
                assert!(contest.bytes > 32 * 48, "{}", subject.name);
                (contest.fused)()();
                let quantiser = matches!(subject.what, What::Quantiser { .. });
                assert_eq!(contest.plain.is_none(), quantiser, "{}", subject.name);
                if let Some(plain) = contest.plain {
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

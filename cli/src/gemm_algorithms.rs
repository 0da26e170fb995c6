//! The cuBLASLt algorithms that `burn-megatron-bench gemm --tune` has written to a file. Rank 0 reads the file for
//! all ranks.

use std::path::Path;

use burn::tensor::Device;
use burn_megatron::comm::{Communicator, broadcast_bytes};
use burn_megatron::kernels::gemm::algorithms::{
    GemmAlgorithms, GemmLibrary, gemm_library, use_algorithms,
};
use burn_megatron::regular_file;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::numbers::count;
use crate::recipe::Recipe;

/// Decision of rank 0.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Decision {
    /// Use these algorithms.
    Use(GemmAlgorithms),
    /// Use no algorithms from the file, for this reason.
    Ignore(String),
    /// Do not start the run, for this reason.
    Fail(String),
}

/// Checks the file that a recipe names, before ranks start.
///
/// # Errors
/// Returns an error if the file cannot be read, if the device has no cuBLASLt, or if a deterministic run would have
/// to ignore the file.
pub fn check(recipe: &Recipe, device: &Device) -> Result<(), Error> {
    match decide(recipe, device) {
        Some(Decision::Fail(reason)) => Err(reason.into()),
        _ => Ok(()),
    }
}

/// Makes all ranks use the algorithms that rank 0 reads, if the recipe names a file. Returns a line for the header.
/// Collective: call on all ranks, before the first matrix multiplication.
///
/// # Errors
/// Returns the errors of [`check`] on rank 0 on every rank. Also returns an error if a rank has another device or
/// another library version than rank 0.
pub fn share(
    recipe: &Recipe,
    device: &Device,
    world: &dyn Communicator,
) -> Result<Option<String>, Error> {
    let Some(path) = recipe.kernels.gemm_algorithms.as_deref() else {
        return Ok(None);
    };
    let own = (world.rank() == 0)
        .then(|| decide(recipe, device))
        .flatten();
    let shared = broadcast_bytes(world, &serde_json::to_vec(&own)?, 0)?;
    let decision: Option<Decision> = serde_json::from_slice(&shared)?;
    match decision {
        Some(Decision::Use(algorithms)) => {
            use_algorithms(device, &algorithms).map_err(|error| {
                let rank = world.rank();
                format!(
                    "kernels.gemm_algorithms: rank {rank} cannot use what rank 0 has read: {error}"
                )
            })?;
            let products = count(algorithms.products.len(), "product");
            let library = algorithms.library;
            let path = path.display();
            Ok(Some(format!(
                "algorithms of {products} from {path}, for {library}"
            )))
        }
        Some(Decision::Ignore(reason)) => Ok(Some(reason)),
        Some(Decision::Fail(reason)) => Err(reason.into()),
        None => Ok(None),
    }
}

fn decide(recipe: &Recipe, device: &Device) -> Option<Decision> {
    let path = recipe.kernels.gemm_algorithms.as_deref()?;
    let decided = || -> Result<Decision, String> {
        let library = gemm_library(device).map_err(|reason| {
            format!("kernels.gemm_algorithms: {reason}; remove gemm_algorithms")
        })?;
        Ok(fitting(
            read(path)?,
            &library,
            path,
            recipe.train.deterministic,
        ))
    };
    Some(decided().unwrap_or_else(Decision::Fail))
}

/// Maximum size of a file of algorithms, in bytes.
const MAX_BYTES: u64 = 64 << 20;

fn read(path: &Path) -> Result<GemmAlgorithms, String> {
    let failed = |error: String| {
        format!(
            "kernels.gemm_algorithms: {}: {error}; expected a file that burn-megatron-bench gemm --tune has written",
            path.display()
        )
    };
    let text =
        regular_file::read_text(path, MAX_BYTES).map_err(|error| failed(error.to_string()))?;
    serde_json::from_str(&text).map_err(|error| failed(error.to_string()))
}

/// Decides whether algorithms are used: they must be for this device and library.
fn fitting(
    algorithms: GemmAlgorithms,
    own: &GemmLibrary,
    path: &Path,
    deterministic: bool,
) -> Decision {
    if algorithms.library == *own {
        return Decision::Use(algorithms);
    }
    let (path, theirs) = (path.display(), algorithms.library);
    if deterministic {
        return Decision::Fail(format!(
            "deterministic requires fixed algorithms, but kernels.gemm_algorithms = {path} is for {theirs}, and this \
             is {own}: write a file for this device with burn-megatron-bench gemm --tune, or remove gemm_algorithms"
        ));
    }
    Decision::Ignore(format!(
        "algorithms of the heuristic; {path} is ignored: it is for {theirs}, and this is {own}"
    ))
}

#[cfg(test)]
mod tests {
    use burn_megatron::comm::World;

    use super::*;

    fn of(device: &str) -> GemmAlgorithms {
        GemmAlgorithms {
            library: library(device),
            products: Default::default(),
        }
    }

    fn library(device: &str) -> GemmLibrary {
        GemmLibrary {
            device: device.into(),
            cublaslt: 120_901,
        }
    }

    #[test]
    fn a_file_of_another_device_is_ignored_and_said() {
        let path = Path::new("h100.json");
        let decide = |deterministic| fitting(of("H100"), &library("H200"), path, deterministic);
        assert_eq!(
            decide(false),
            Decision::Ignore(
                "algorithms of the heuristic; h100.json is ignored: it is for H100 with cuBLASLt 12.9.1, and this is H200 with \
                 cuBLASLt 12.9.1"
                    .into()
            )
        );
        let Decision::Fail(reason) = decide(true) else {
            panic!("a deterministic run does not ignore it")
        };
        assert!(
            reason.contains("burn-megatron-bench gemm --tune"),
            "{reason}"
        );
        let own = fitting(of("H100"), &library("H100"), path, true);
        assert_eq!(own, Decision::Use(of("H100")));
    }

    #[test]
    fn a_device_without_the_library_is_refused_on_every_rank() {
        let mut recipe = Recipe::default();
        assert!(check(&recipe, &Device::flex()).is_ok());
        recipe.kernels.gemm_algorithms = Some("nowhere.json".into());
        let expected = check(&recipe, &Device::flex()).unwrap_err().to_string();
        let reason = "kernels.gemm_algorithms: cuBLASLt is for CUDA devices";
        assert!(expected.starts_with(reason), "{expected}");
        World::threads(2)
            .unwrap()
            .run(|rank| {
                let shared = share(&recipe, &Device::flex(), &*rank.communicator());
                assert_eq!(shared.unwrap_err().to_string(), expected);
                Ok::<_, Error>(())
            })
            .unwrap();
        let error = read(Path::new("nowhere.json")).unwrap_err();
        assert!(
            error.starts_with("kernels.gemm_algorithms: nowhere.json: No such file"),
            "{error}"
        );
    }
}

//! Checks that all ranks run the same recipe on the same data. Ranks that are processes read their own flags and
//! files.

use std::hash::{DefaultHasher, Hash, Hasher};

use burn_megatron::comm::{Communicator, all_gather_bytes};
use burn_megatron_data::Dataset;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::recipe::Recipe;

/// The recipe and the data of a rank.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct RankInputs {
    recipe: String,
    data: String,
    fingerprint: u64,
}

/// Checks that all ranks have the recipe and the data of rank 0. Collective: call on all ranks.
///
/// # Errors
/// Returns the first difference on every rank, with the ranks and both values.
pub fn check(world: &dyn Communicator, recipe: &Recipe, data: &dyn Dataset) -> Result<(), Error> {
    let mut recipe = recipe.clone();
    // The paths of the data may differ between machines, but the content must be the same.
    recipe.data.clear_paths();
    let own = RankInputs {
        recipe: toml::to_string(&recipe)?,
        data: data.describe(),
        fingerprint: data.fingerprint(),
    };
    if is_equal_on_all(world, &own)? {
        return Ok(());
    }
    let all = all_gather_bytes(world, &serde_json::to_vec(&own)?)?;
    let inputs = all
        .iter()
        .map(|bytes| serde_json::from_slice::<RankInputs>(bytes));
    let inputs: Vec<RankInputs> = inputs.collect::<Result<_, _>>()?;
    let others = inputs.iter().enumerate().skip(1);
    match others
        .filter_map(|(rank, other)| difference(&inputs[0], rank, other))
        .next()
    {
        None => Ok(()),
        Some(difference) => Err(difference.into()),
    }
}

/// Returns whether all ranks have these inputs. Compares hashes, because the texts of thousands of ranks are many
/// megabytes.
fn is_equal_on_all(world: &dyn Communicator, own: &RankInputs) -> Result<bool, Error> {
    let mut hasher = DefaultHasher::new();
    (&own.recipe, own.fingerprint).hash(&mut hasher);
    let own = hasher.finish().cast_signed();
    let all: Vec<i64> = world.all_gather(vec![own].into())?.into_vec();
    Ok(all.iter().all(|hash| *hash == own))
}

fn difference(first: &RankInputs, rank: usize, other: &RankInputs) -> Option<String> {
    let lines = || first.recipe.lines().zip(other.recipe.lines());
    if let Some((a, b)) = lines().find(|(a, b)| a != b) {
        return Some(format!(
            "the ranks have different recipes: rank 0 has `{a}`, rank {rank} `{b}`"
        ));
    }
    if first.recipe != other.recipe {
        return Some(format!(
            "rank 0 and rank {rank} have recipes of different length"
        ));
    }
    let of = |start: &RankInputs| format!("{} ({:016x})", start.data, start.fingerprint);
    // Only the content is compared, because the paths may differ.
    (first.fingerprint != other.fingerprint).then(|| {
        format!(
            "the ranks read different data: rank 0 has {}, rank {rank} {}; pass the same --data to all ranks",
            of(first),
            of(other)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_megatron::comm::World;
    use burn_megatron_data::TextData;

    fn failure(change: impl Fn(&mut Recipe) + Sync, data: [&str; 2]) -> Option<String> {
        let texts = data.map(|path| TextData::open(path.as_ref()).unwrap());
        let result = World::threads(2).unwrap().run(|rank| {
            let mut recipe = Recipe::default();
            if rank.rank() == 1 {
                change(&mut recipe);
            }
            check(&*rank.communicator(), &recipe, &texts[rank.rank()])
        });
        result.err().map(|error| error.to_string())
    }

    #[test]
    fn the_first_difference_is_named() {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
        let other = concat!(env!("CARGO_MANIFEST_DIR"), "/tests");
        assert_eq!(failure(|_| {}, [source; 2]), None);
        let moved = |recipe: &mut Recipe| recipe.data.path = Some("elsewhere".into());
        assert_eq!(failure(moved, [source; 2]), None);
        let text = failure(|recipe| recipe.train.seed = 77, [source; 2]).unwrap();
        assert!(
            text.contains("rank 0 has `seed = ") && text.contains("rank 1 `seed = 77`"),
            "{text}"
        );
        let text = failure(|_| {}, [source, other]).unwrap();
        assert!(text.contains("the ranks read different data"), "{text}");
    }
}

//! Ranks that are processes each read their own flags and files: they must have read the same.

use burn_megatron::comm::{Communicator, all_gather_bytes};
use burn_megatron::data::TextData;
use serde::{Deserialize, Serialize};

use crate::recipe::{Error, Recipe};

/// What a rank was started with.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Start {
    recipe: String,
    bytes: usize,
    digest: u64,
}

/// Checks that all ranks have the recipe and the text of rank 0; all must come.
///
/// # Errors
/// On every rank, the first difference, with the ranks and both values.
pub fn check(world: &dyn Communicator, recipe: &Recipe, text: &TextData) -> Result<(), Error> {
    let mut recipe = recipe.clone();
    // Where the text lies may differ from machine to machine; what it says may not.
    recipe.data.path = None;
    let own = Start {
        recipe: toml::to_string(&recipe)?,
        bytes: text.training().len() + text.held_out().len(),
        digest: digest([text.training(), text.held_out()]),
    };
    let all = all_gather_bytes(world, &serde_json::to_vec(&own)?)?;
    let starts = all
        .iter()
        .map(|bytes| serde_json::from_slice::<Start>(bytes));
    let starts: Vec<Start> = starts.collect::<Result<_, _>>()?;
    let others = starts.iter().enumerate().skip(1);
    match others
        .filter_map(|(rank, other)| difference(&starts[0], rank, other))
        .next()
    {
        None => Ok(()),
        Some(difference) => Err(difference.into()),
    }
}

fn difference(first: &Start, rank: usize, other: &Start) -> Option<String> {
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
    let of = |start: &Start| format!("{} bytes with digest {:016x}", start.bytes, start.digest);
    (first != other).then(|| {
        format!(
            "the ranks read different text: rank 0 has {}, rank {rank} {}; give all the same --data",
            of(first),
            of(other)
        )
    })
}

/// 64-bit FNV-1a: it finds an accident, not an attack.
fn digest(parts: [&[u8]; 2]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    parts.concat().iter().fold(0xcbf2_9ce4_8422_2325, step)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_megatron::comm::World;

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
        let other = concat!(env!("CARGO_MANIFEST_DIR"), "/examples");
        assert_eq!(failure(|_| {}, [source; 2]), None);
        let moved = |recipe: &mut Recipe| recipe.data.path = Some("elsewhere".into());
        assert_eq!(failure(moved, [source; 2]), None);
        let text = failure(|recipe| recipe.train.seed = 77, [source; 2]).unwrap();
        assert!(
            text.contains("rank 0 has `seed = ") && text.contains("rank 1 `seed = 77`"),
            "{text}"
        );
        let text = failure(|_| {}, [source, other]).unwrap();
        assert!(text.contains("the ranks read different text"), "{text}");
    }

    #[test]
    fn the_digest_is_that_of_fnv() {
        // From the reference's test vectors: "foobar".
        assert_eq!(digest([b"foo", b"bar"]), 0x85944171f73967e8);
    }
}

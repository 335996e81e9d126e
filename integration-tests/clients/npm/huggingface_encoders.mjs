// The npm package `@huggingface/inference`, as it is, with an encoder. Prints what it got as one line of JSON.
import { InferenceClient } from "@huggingface/inference";

const client = new InferenceClient(undefined, { endpointUrl: process.argv[2] });
const sentences = ["The ocean is deep.", "Birds fly over the house."];
const got = {};

got.features = await client.featureExtraction({ inputs: "The sea is deep." });
got.similarity = await client.sentenceSimilarity({ inputs: { source_sentence: "The sea is deep.", sentences } });
console.log(JSON.stringify(got));

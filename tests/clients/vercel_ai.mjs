// The AI SDK's calls, one by its name: `node vercel_ai.mjs PROVIDER CALL` prints what it gave as JSON.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, hasToolCall, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const { QUIRE_CLIENTS_URL: url, QUIRE_CLIENTS_KEY: apiKey, QUIRE_CLIENTS_MODEL: name } = process.env;
const baseURL = `${url}/v1`;
const models = {
  compatible: () => createOpenAICompatible({ name: "quire", baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true })(name),
  chat: () => createOpenAI({ baseURL, apiKey }).chat(name),
  responses: () => createOpenAI({ baseURL, apiKey })(name),
  anthropic: () => createAnthropic({ baseURL, apiKey })(name),
};
const schema = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(150) });
const weather = tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.string().max(20) }),
  execute: async ({ city }) => `sunny in ${city}`,
});

const [provider, call] = process.argv.slice(2);
const options = { model: models[provider](), temperature: 0, maxOutputTokens: 100, maxRetries: 0 };
const person = { ...options, schema, prompt: "Describe a person." };
const calls = {
  text: async () => {
    const { text, usage } = await generateText({ ...options, system: "Be brief.", prompt: "Say hello." });
    return { text, tokens: usage.outputTokens };
  },
  stream: async () => {
    const result = streamText({ ...options, prompt: "Say hello." });
    let text = "";
    for await (const part of result.textStream) text += part;
    return { text, tokens: (await result.usage).outputTokens };
  },
  object: async () => (await generateObject(person)).object,
  streamedObject: async () => {
    const result = streamObject(person);
    for await (const _ of result.partialObjectStream);
    return await result.object;
  },
  // The second step has the call and its result in its history, and may call no more.
  tools: async () => {
    const { steps } = await generateText({
      ...options, prompt: "The weather in Paris?", tools: { weather }, stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
    });
    return steps.map(({ text, toolCalls }) => ({ text, calls: toolCalls.map(({ toolName, input }) => ({ toolName, input })) }));
  },
  streamedTools: async () => {
    const result = streamText({
      ...options, prompt: "The weather in Paris?", tools: { weather }, toolChoice: "required", stopWhen: hasToolCall("weather"),
    });
    await result.consumeStream();
    return (await result.toolCalls).map(({ toolName, input }) => ({ toolName, input }));
  },
  tooLong: async () => {
    try {
      await generateText({ ...options, prompt: "one two three ".repeat(3000) });
    } catch (error) {
      return { isCallError: APICallError.isInstance(error), status: error.statusCode, message: error.message };
    }
    return {};
  },
};
console.log(JSON.stringify(await calls[call]()));
